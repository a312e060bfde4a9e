# SPDX-License-Identifier: Apache-2.0
"""The certificate where kernels do not repeat: the true norm against the stated one, cell by cell.

    python -m benchmarks.unrepeatable
    python -m benchmarks.unrepeatable --seeds 5 --out runs/benchmarks/unrepeatable

A bare model on two gloo ranks. In every backward each attention output's gradient, and the embedding's, is rounded to
bfloat16 and a share of its elements a unit off, fresh each time (tests/bare/noise.py); the truth is recomputed without.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.run import Progress, digest
from tests.world import World

LAYOUTS = ("fsdp2", "fsdp1")
DTYPES = ("float32", "bfloat16")
SHARES = (0.0, 0.001, 0.01, 0.1)
SIZES = (10.0, 1e3, 1e5)


def measure(seeds: int, layouts=LAYOUTS, dtypes=DTYPES, shares=SHARES, sizes=SIZES) -> list[dict[str, Any]]:
    """One row for each cell and seed: what ``tests.bare.scenarios.certify_unrepeatable`` returns, and the cell."""
    cells = list(itertools.product(layouts, dtypes, shares, sizes, range(seeds)))
    rows = []
    progress = Progress(len(cells))
    with World(2) as world:
        for layout, dtype, share, size, seed in cells:
            cell = {"layout": layout, "dtype": dtype, "share": share, "size": size, "seed": seed}
            progress.step(" ".join(map(str, cell.values())))
            found, other = world.run("tests.bare.scenarios.certify_unrepeatable", **cell)
            assert found == other, "every rank finds the same"
            rows.append({**found, "planted_size": size, **{k: v for k, v in cell.items() if k != "size"}})
    return rows


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong in one row; nothing where the certificate keeps its word."""
    found = []
    if not abs(row["norm_after"] - row["truth"]) <= row["error_bound"]:
        found.append("the true norm is outside of the bound")
    if row["places"] != row["planted"]:
        found.append("other tokens are named than the planted one")
    if row["verdict"] != "explained":
        found.append(f"the verdict is {row['verdict']}")
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table: per share and size the worst over layouts, precisions and seeds."""
    lines = [
        "| elements off | spike / healthy | cells | kept its word | largest error / bound | bound / healthy norm "
        "| by subtraction, swap, recomputation | cost (f), largest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_cell = {}
    for row in rows:
        by_cell.setdefault((row["share"], row["planted_size"]), []).append(row)
    for (share, size), group in by_cell.items():
        error = max(abs(row["norm_after"] - row["truth"]) / row["error_bound"] for row in group)
        bound = max(row["error_bound"] / row["truth"] for row in group)
        num_good = sum(not problems(row) for row in group)
        methods = [row["method"] for row in group]
        ways = ", ".join(str(methods.count(way)) for way in ("subtract", "swap", "recompute"))
        cost = max(row["cost"] for row in group)
        lines.append(
            f"| {share:.1%} | {size:g} | {len(group)} | {num_good} | {error:.2g} | {bound:.2g} | {ways} | {cost} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure all cells, print the table, and say what does not hold; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unrepeatable", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="batches and noises per cell (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for unrepeatable.json")
    parsed = parser.parse_args(arguments)
    rows = measure(parsed.seeds)
    print(markdown(rows))
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"core_sha256": digest(), "rows": rows}, indent=1)
        (parsed.out / "unrepeatable.json").write_text(text + "\n")
    wrong = [(row, problems(row)) for row in rows if problems(row)]
    for row, found in wrong:
        print(f"{row}: {'; '.join(found)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
