# SPDX-License-Identifier: Apache-2.0
"""Make the pictures in examples/: the demo's report, and made-up runs with 30 events, one healed event, and none.

    python scripts/example_pictures.py [FOLDER]

Each at 1440 x 900 and 400 x 850, light and dark. Needs what scripts/screenshot_report.py needs, and pillow.
"""

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "scripts")]

import screenshot_report as shots  # noqa: E402

from gradloc.report import output  # noqa: E402
from gradloc.report.pages import page  # noqa: E402
from gradloc.report.runs.run import read_run  # noqa: E402
from tests.report.builder import make_metrics, write_run  # noqa: E402
from tests.report.events import event  # noqa: E402
from tests.report.long_run import write_long_run  # noqa: E402

SIZES = {"": (1440, 900), "-400": (400, 850)}
COLOURS = 96
"""Colors of a picture's palette; the page has few, so the files stay small."""


def main(out: Path) -> int:
    """Take the pictures; return the exit code."""
    problem = shots.missing()
    if problem:
        print(f"example_pictures: {problem}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made, shots.browser() as driver:
        folder = Path(made)
        runs = {
            "report": REPO / "examples" / "demo",
            "thirty": write_long_run(folder / "thirty"),
            "cured": write_run(folder / "cured", [event("healed")], metrics=make_metrics(50, (40,))),
            "healthy": write_long_run(folder / "healthy", num_events=0),
        }
        for name, run in runs.items():
            html = folder / f"{name}.html"
            output.write(html, page.render(read_run(run)))
            for suffix, (width, height) in SIZES.items():
                for is_dark in (False, True):
                    path = out / f"{name}{suffix}{'-dark' if is_dark else ''}.png"
                    driver.get("about:blank")
                    shots.show(driver, html, width, height, is_dark, scale=1.0 if width > 600 else 1.5)
                    time.sleep(0.5)  # the curve is drawn once its element has a size
                    shots.capture(driver, path)
                    picture = Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                    picture.save(path, optimize=True)
                    print(f"{path} {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "examples"))
