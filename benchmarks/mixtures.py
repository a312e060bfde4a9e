# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of culprits on two gloo ranks, against every token's own backward.

    python -m benchmarks.mixtures
    python -m benchmarks.mixtures --seeds 100 --out runs/benchmarks/mixtures

What is planted and counted is in tests/bare/mixtures.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run import Progress, digest
from tests.bare.mixtures import problems
from tests.world import World

LAYOUTS = ("fsdp2", "fsdp1")
COLUMNS = ("seed", "culprits", "tokens", "norm", "over", "named", "missed", "weak", "innocent", "status", "verdict")


def measure(seeds: int, layouts: Sequence[str] = LAYOUTS) -> list[dict[str, Any]]:
    """What ``tests.bare.mixtures.mixture`` returns for each layout and seed, and the layout."""
    progress, rows = Progress(len(layouts) * seeds), []
    with World(2) as world:
        for layout in layouts:
            for seed in range(seeds):
                progress.step(f"{layout} {seed}")
                found, other = world.run("tests.bare.mixtures.mixture", seed=seed, layout=layout)
                assert found == other, "every rank finds the same"
                rows.append({**found, "layout": layout})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table with a row per seed of the first layout, and what the others have beside it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for row in (row for row in rows if row["layout"] == rows[0]["layout"]):
        cells = [f"{row[name]:.3g}" if name == "norm" else str(row[name]) for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    for layout in dict.fromkeys(row["layout"] for row in rows):
        group = [row for row in rows if row["layout"] == layout]
        total = {name: sum(row[name] for row in group) for name in ("over", "named", "missed", "innocent")}
        counts = ", ".join(f"{total[name]} {name}" for name in total)
        lines.append(f"\n{layout}: {len(group)} mixtures; of their tokens {counts}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and say what does not hold; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixtures", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="mixtures per layout (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for mixtures.json")
    parsed = parser.parse_args(arguments)
    rows = measure(parsed.seeds)
    print(markdown(rows))
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
        (parsed.out / "mixtures.json").write_text(json.dumps({"core_sha256": digest(), "rows": rows}, indent=1) + "\n")
    wrong = [(row, problems(row)) for row in rows if problems(row)]
    for row, found in wrong:
        print(f"{row}: {'; '.join(found)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
