# SPDX-License-Identifier: Apache-2.0
"""The trigger's rule beside others, on generated and on real series of gradient norms.

    python -m benchmarks.trigger --out runs/benchmarks/trigger
    python -m benchmarks.trigger --series FOLDER     # with any real series, JSON of `series: [[step, norm], ...]`

Needs numpy; about ten minutes on one core. Writes trigger.json (every number, the seeds) and trigger.md.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.run import REPO, Progress, as_typed, digest, finish, parser
from benchmarks.trigger import series
from benchmarks.trigger.rules import RULES
from benchmarks.trigger.score import score_collapse, score_kind, score_real
from benchmarks.trigger.tables import markdown

GROWTHS = (1.25, 1.5, 2.0)
MINI_BATCHES = (1, 4, 8, 16)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the record."""
    options = parser("trigger", __doc__)
    options.add_argument("--seeds", type=int, default=100, help="generated series of each kind (default: %(default)s)")
    options.add_argument("--series", type=Path, default=REPO / "docs" / "series", help="folder of real series")
    parsed = options.parse_args(arguments)
    run = measure(parsed.seeds, sorted(parsed.series.glob("*.json")), as_typed("trigger", arguments))
    finish(run, parsed.out, "trigger", markdown(run))
    return 0


def measure(num_seeds: int, files: list[Path], command: str) -> dict[str, Any]:
    """The whole record: every rule on every series.

    Args:
        num_seeds: generated series of each kind, seeds 0, 1, ...
        files: real series.
        command: for the record.
    """
    seeds, started = range(num_seeds), time.perf_counter()
    collapses = [(growth, size) for growth in GROWTHS for size in MINI_BATCHES]
    progress = Progress(len(series.HEALTHY) + len(collapses))
    run: dict[str, Any] = {
        "command": command,
        "core_sha256": digest(),
        "seeds": list(seeds),
        "rules": list(RULES),
        "real": [_real(path) for path in files],
        "healthy": [],
        "collapses": [],
    }
    for number, kind in enumerate(series.HEALTHY):
        scores = {name: score_kind(kind, number, make, seeds) for name, make in RULES.items()}
        run["healthy"].append({"name": kind.name, "rules": scores})
        progress.step(kind.name)
    for number, (growth, size) in enumerate(collapses):
        scores = {name: score_collapse(growth, size, number, make, seeds) for name, make in RULES.items()}
        run["collapses"].append({"growth": growth, "mini_batches": size, "after": series.NUM_AFTER, "rules": scores})
        progress.step(f"collapse x {growth:g}, {size} mini-batches")
    run["seconds"] = round(time.perf_counter() - started, 1)
    return run


def _real(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    norms = [float(norm) for _, norm in found["series"]]
    scores = {name: score_real(norms, make) for name, make in RULES.items()}
    return {"name": path.stem, "source": found.get("source", ""), "rules": scores}


if __name__ == "__main__":
    sys.exit(main())
