# SPDX-License-Identifier: Apache-2.0
"""Measure how often ``gradloc.mismatch`` names a known fault:

python -m lab.benchmarks.mismatch.tiny TINY
python -m lab.benchmarks.mismatch.forwards TINY POOL.npz --seed 20 --text-rate 2e-3 --policy-rate 1.5e-4
python -m lab.benchmarks.mismatch POOL.npz [POOL.npz ...] --clean SMOLLM2_POOL.npz -o RECORD.json
python -m lab.benchmarks.mismatch --kinds            # the table of the kinds
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from gradloc.mismatch import KINDS as TABLE
from gradloc.mismatch import judge

from .cases import KINDS, Maker


def confusion(pools: list[Path], cases: int, seed: int) -> dict[str, dict[str, int]]:
    """Return true kind -> name -> number of batches."""
    found = {}
    for kind in KINDS:
        made = [Maker(pools[case % len(pools)], seed + case) for case in range(cases)]
        found[kind] = dict(Counter(judge(getattr(maker, kind)().columns()).name for maker in made).most_common())
    return found


def pairs(pools: list[Path], cases: int, seed: int) -> dict[str, dict[str, int]]:
    """Return true pair -> names -> number of batches."""
    found: dict[str, Counter] = {}
    for case in range(cases):
        rows, true = Maker(pools[case % len(pools)], seed + case).two()
        found.setdefault(" + ".join(sorted(true)), Counter())[judge(rows.columns()).name] += 1
    return {name: dict(found[name].most_common()) for name in sorted(found)}


def outcome(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Count the pairs named as both, as "cannot tell", as one of the two, and otherwise."""
    counts = Counter()
    for true, names in found.items():
        for name, count in names.items():
            said, both = set(name.split(" + ")), set(true.split(" + "))
            right = "two" if said == both else "cannot tell" if name == "cannot tell" else None
            counts[right or ("one of the two" if said < both else "another")] += count
    return {name: counts[name] for name in ("two", "cannot tell", "one of the two", "another")}


def clean(pool: Path, cases: int, seed: int) -> dict[str, dict[str, int]]:
    """Return precisions of the two forwards -> name -> number of batches without a fault."""
    pairs = {
        "float32, two kernels": ("f32_eager_main_1", "f32_main_1"),
        "bfloat16, decode with a cache and whole rows": ("rollout_main_1", "bf16_main_1"),
        "bfloat16, two kernels": ("bf16_eager_main_1", "bf16_main_1"),
        "bfloat16 and float32": ("rollout_main_1", "f32_main_1"),
        "float16 and bfloat16": ("fp16_main_1", "bf16_main_1"),
        "float16 and float32": ("fp16_main_1", "f32_main_1"),
    }
    found: dict[str, Counter] = {}
    for case in range(cases):
        maker = Maker(pool, seed + case)
        there = {name: pair for name, pair in pairs.items() if set(pair) <= maker.pool.keys()}
        name = list(there)[case % len(there)]
        found.setdefault(name, Counter())[judge(maker.healthy(*there[name]).columns()).name] += 1
    return {name: dict(found[name]) for name in sorted(found)}


def kinds_table() -> list[str]:
    """Return the table of the kinds for docs/mismatch.md."""
    rows = [f"| {name.replace('_', ' ')} | {k.shows} | {k.helps} | {k.threads} |" for name, k in TABLE.items()]
    return ["| kind | fingerprint | what helps | public threads |", "| --- | --- | --- | --- |", *rows]


def markdown(record: dict) -> list[str]:
    """Return the table of results for docs/mismatch.md."""
    names = [*KINDS]
    lines = ["| true kind | named right | otherwise named |", "| --- | --- | --- |"]
    for kind in names:
        found = record["kinds"][kind]
        others = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.items() if name != kind)
        lines.append(f"| {kind.replace('_', ' ')} | {found.get(kind, 0)} of {sum(found.values())} | {others or '–'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pools", type=Path, nargs="*", metavar="POOL", help="of seeds that the rules were not made with"
    )
    parser.add_argument("--kinds", action="store_true", help="print the table of the kinds, and end")
    parser.add_argument("--clean", type=Path, nargs="*", default=[], metavar="POOL", help="for batches without a fault")
    parser.add_argument("--cases", type=int, default=100, help="batches of each kind")
    parser.add_argument("--batches", type=int, default=500, help="batches without a fault")
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.kinds:
        print("\n".join(kinds_table()))
        return
    if not args.pools:
        parser.error("name a pool, or --kinds")
    record = {
        "cases": args.cases,
        "kinds": confusion(args.pools, args.cases, args.seed),
        "pairs": pairs(args.pools, 3 * args.cases, args.seed),
        "clean": {pool.stem: clean(pool, args.batches, args.seed) for pool in args.clean},
    }
    record["outcome_of_pairs"] = outcome(record["pairs"])
    print("\n".join(markdown(record)))
    print(json.dumps({name: record[name] for name in ("pairs", "outcome_of_pairs", "clean")}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
