# SPDX-License-Identifier: Apache-2.0
"""Check the certificate with kernels that are not deterministic: the true norm against the stated one.

    python -m lab.benchmarks.unrepeatable
    python -m lab.benchmarks.unrepeatable --seeds 5

A toy model on two gloo ranks. In every backward the gradients of each attention output and of the embedding are rounded
to bfloat16, and a random share of their elements is off by one unit (tests/toy_model/noise.py). The truth is computed
without noise. Writes unrepeatable.json and unrepeatable.md.
"""

import itertools

from tqdm import tqdm

from lab.benchmarks.run import Parser, Record, finish
from lab.output import table
from tests.world import World

LAYOUTS = ("fsdp2", "fsdp1")
DTYPES = ("float32", "bfloat16")
SHARES = (0.0, 0.001, 0.01, 0.1)
SIZES = (10.0, 1e3, 1e5)
KEYS = ("layout", "dtype", "share", "size", "seed")
HEAD = [
    "elements off",
    "spike / healthy",
    "cells",
    "kept its word",
    "largest error / bound",
    "bound / healthy norm",
    "by subtraction, swap, recomputation",
    "cost (f), largest",
]


def measure(seeds: int) -> list[Record]:
    """Return a row for each cell and seed: the cell and its ``tests.toy_model.scenarios.certify_unrepeatable``."""
    values = itertools.product(LAYOUTS, DTYPES, SHARES, SIZES, range(seeds))
    cells = [dict(zip(KEYS, cell, strict=True)) for cell in values]
    rows = []
    with World(2) as world:
        for cell in tqdm(cells):
            first, other = world.run("tests.toy_model.scenarios.certify_unrepeatable", **cell)
            assert first == other, "every rank finds the same"
            rows.append({**cell, **first, "planted_size": cell["size"]})
    return rows


def problems(row: Record) -> list[str]:
    """Return what is wrong in a row; empty if the certificate holds."""
    sentences = []
    if not abs(row["norm_after"] - row["truth"]) <= row["error_bound"]:
        sentences.append("the true norm is outside of the bound")
    if row["places"] != row["planted"]:
        sentences.append("other tokens are named than the planted one")
    if row["verdict"] != "explained":
        sentences.append(f"the verdict is {row['verdict']}")
    return sentences


def markdown(rows: list[Record]) -> str:
    """Return a table with the worst over layouts, precisions and seeds for each share and size."""
    groups: dict[tuple[float, float], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["share"], row["planted_size"]), []).append(row)
    lines: list[list[object]] = [HEAD]
    for (share, size), group in groups.items():
        error = max(abs(row["norm_after"] - row["truth"]) / row["error_bound"] for row in group)
        bound = max(row["error_bound"] / row["truth"] for row in group)
        num_good = sum(not problems(row) for row in group)
        methods = [row["method"] for row in group]
        ways = ", ".join(str(methods.count(way)) for way in ("subtract", "swap", "recompute"))
        line = [f"{share:.1%}", f"{size:g}", len(group), num_good, f"{error:.2g}", f"{bound:.2g}", ways]
        lines.append([*line, max(row["cost"] for row in group)])
    return table(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cells, print the table and what does not hold; the exit code is 1 if something does not."""
    options = Parser("unrepeatable", __doc__)
    options.add_argument("--seeds", type=int, default=3, help="batches and noises per cell (%(default)s)")
    parsed = options.parse_args(arguments)
    rows = measure(parsed.seeds)
    finish(parsed, {"rows": rows}, markdown(rows))
    wrong = [f"{row}: {'; '.join(problems(row))}" for row in rows if problems(row)]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
