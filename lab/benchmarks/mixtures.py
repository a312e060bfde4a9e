# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of culprits on two gloo ranks, against every token's own backward.

    python -m lab.benchmarks.mixtures
    python -m lab.benchmarks.mixtures --seeds 100

What is planted and counted is in tests/toy_model/mixtures.py. Writes mixtures.json and mixtures.md.
"""

import sys
from collections.abc import Sequence

from lab.benchmarks.run import Record, digest, exit_code, finish, on_two_ranks, parser, table
from tests.toy_model.mixtures import problems

LAYOUTS = ("fsdp2", "fsdp1")
COLUMNS = ("seed", "culprits", "tokens", "norm", "over", "named", "missed", "weak", "innocent", "status", "verdict")


def measure(seeds: int, layouts: Sequence[str] = LAYOUTS) -> list[Record]:
    """What ``tests.toy_model.mixtures.mixture`` returns for each layout and seed, and the layout."""
    cells = [{"layout": layout, "seed": seed} for layout in layouts for seed in range(seeds)]
    return on_two_ranks("tests.toy_model.mixtures.mixture", cells)


def markdown(rows: list[Record]) -> str:
    """A table with a row per seed of the first layout, and each layout's totals below it."""
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(row["layout"], []).append(row)
    first = next(iter(groups.values()))
    parts = [table([COLUMNS, *([f"{row[c]:.3g}" if c == "norm" else row[c] for c in COLUMNS] for row in first)])]
    for layout, group in groups.items():
        counts = ", ".join(
            f"{sum(row[name] for row in group)} {name}" for name in ("over", "named", "missed", "innocent")
        )
        parts.append(f"{layout}: {len(group)} mixtures; of their tokens {counts}.")
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and say what does not hold; returns the exit code."""
    options = parser("mixtures", __doc__)
    options.add_argument("--seeds", type=int, default=30, help="mixtures per layout (%(default)s)")
    parsed = options.parse_args(arguments)
    rows = measure(parsed.seeds)
    finish({"core_sha256": digest(), "rows": rows}, parsed.out, "mixtures", markdown(rows))
    return exit_code(rows, problems)


if __name__ == "__main__":
    sys.exit(main())
