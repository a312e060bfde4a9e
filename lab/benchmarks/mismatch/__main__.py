# SPDX-License-Identifier: Apache-2.0
"""Measure how often ``gradloc.mismatch`` names a known fault:

python -m lab.benchmarks.mismatch.tiny TINY
python -m lab.benchmarks.mismatch.forwards TINY POOL.npz --seed 20 --text-rate 2e-3 --policy-rate 1.5e-4
python -m lab.benchmarks.mismatch POOL.npz [POOL.npz ...] --clean SMOLLM2_POOL.npz -o RECORD.json
python -m lab.benchmarks.mismatch --kinds            # the table of the kinds
python -m lab.benchmarks.mismatch POOL.npz --picture docs/mismatch.png
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from gradloc.mismatch import KINDS as TABLE
from gradloc.mismatch import judge
from lab.output import table, write_json

from .cases import KINDS, PRECISIONS, Maker, Rows

RANGE = 1.5  # nats of a picture


def counted(draws: Iterable[tuple[str, Rows]]) -> dict[str, dict[str, int]]:
    """Return true kind -> name given -> number of batches, of true kinds and their batches."""
    found: dict[str, Counter[str]] = {}
    for true, rows in draws:
        found.setdefault(true, Counter())[judge(rows.columns()).name] += 1
    return {true: dict(names.most_common()) for true, names in found.items()}


def outcome(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Count the pairs named as both, as "cannot tell", as one of the two, and otherwise."""
    counts = Counter()
    for true, names in found.items():
        for name, count in names.items():
            said, both = set(name.split(" + ")), set(true.split(" + "))
            right = "two" if said == both else "cannot tell" if name == "cannot tell" else None
            counts[right or ("one of the two" if said < both else "another")] += count
    return {name: counts[name] for name in ("two", "cannot tell", "one of the two", "another")}


def clean(pool: Path, first_seed: int, cases: int) -> Iterator[tuple[str, Rows]]:
    """Yield the precisions of two forwards, and a batch of theirs without a fault."""
    for case in range(cases):
        maker = Maker(pool, first_seed + case)
        there = [name for name, pair in PRECISIONS.items() if set(pair) <= maker.pool.keys()]
        name = there[case % len(there)]
        yield name, maker.healthy(*PRECISIONS[name])


def kinds_table() -> str:
    """Return the table of the kinds for docs/mismatch.md."""
    rows = [(name.replace("_", " "), k.shows, k.helps, k.threads) for name, k in TABLE.items()]
    return table([("kind", "fingerprint", "what helps", "public threads"), *rows])


def markdown(record: dict) -> str:
    """Return the table of results for docs/mismatch.md."""
    rows = [("true kind", "named right", "otherwise named")]
    for kind in KINDS:
        found = record["kinds"][kind]
        by_count = sorted(found.items(), key=lambda named: -named[1])  # a record's names are in their own order
        others = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in by_count if name != kind)
        rows.append((kind.replace("_", " "), f"{found.get(kind, 0)} of {sum(found.values())}", others or "–"))
    return table(rows)


def picture(pool: Path, target: Path) -> None:
    """Draw each kind's fingerprint in one batch, with bfloat16's noise."""
    from matplotlib.figure import Figure

    from gradloc.report.figures.palette import LIGHT
    from gradloc.report.figures.style import dress

    figure = Figure(figsize=(12, 7.6), layout="constrained")
    spots = figure.subplots(3, 4, sharex=True, sharey=True).ravel()
    for axes, kind in itertools.zip_longest(spots, KINDS):
        if kind is None:
            axes.set_axis_off()
            continue
        maker = Maker(pool, seed=31)
        found = (maker.healthy() if kind == "noise" else getattr(maker, kind)()).columns()
        d = np.clip(np.nan_to_num(found.difference, nan=-RANGE), -RANGE, RANGE)
        axes.scatter(found.trainer, d, s=3, color=LIGHT.calm, alpha=0.35, linewidths=0)
        axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
        axes.set(title=TABLE[kind].title, xlim=(-12, 0.3), ylim=(-1.05 * RANGE, 1.05 * RANGE))
    figure.supxlabel("trainer's log-prob, nats")
    figure.supylabel("trainer minus rollout, nats (cut at ±1.5)")
    dress(figure, "The fingerprints")
    figure.savefig(target, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("pools", type=Path, nargs="*", metavar="POOL", help="of seeds that the rules were not made with")
    add("--clean", type=Path, nargs="*", default=[], metavar="POOL", help="for batches without a fault")
    add("--cases", type=int, default=100, help="batches of each kind")
    add("--batches", type=int, default=500, help="batches without a fault")
    add("--seed", type=int, default=10_000)
    add("-o", "--output", type=Path)
    add("--kinds", action="store_true", help="print the table of the kinds, and end")
    add("--picture", type=Path, help="draw each kind's fingerprint from the first pool, and end")
    args = parser.parse_args()
    if not args.pools and not args.kinds:
        parser.error("name a pool, or --kinds")
    if args.kinds:
        print(kinds_table())
        return
    if args.picture:
        picture(args.pools[0], args.picture)
        return

    def maker(case: int) -> Maker:
        return Maker(args.pools[case % len(args.pools)], args.seed + case)

    kinds = itertools.product(KINDS, range(args.cases))
    record = {
        "cases": args.cases,
        "kinds": counted((kind, getattr(maker(case), kind)()) for kind, case in kinds),
        "pairs": dict(sorted(counted(maker(case).two() for case in range(3 * args.cases)).items())),
        "clean": {path.stem: counted(clean(path, args.seed, args.batches)) for path in args.clean},
    }
    record["outcome_of_pairs"] = outcome(record["pairs"])
    print(markdown(record))
    print(json.dumps({name: record[name] for name in ("pairs", "outcome_of_pairs", "clean")}, indent=1))
    if args.output:
        write_json(args.output, record)


if __name__ == "__main__":
    main()
