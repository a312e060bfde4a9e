# SPDX-License-Identifier: Apache-2.0
"""Compare the trigger's rule with others on generated and real series of gradient norms.

    python -m lab.benchmarks.trigger --out runs/benchmarks/trigger
    python -m lab.benchmarks.trigger --series FOLDER     # with other real series, JSON of `series: [[step, norm], ...]`

Needs numpy; about ten minutes on one core. Writes trigger.json (every number, the seeds) and trigger.md.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from lab.benchmarks.run import REPO, Parser, finish
from lab.benchmarks.trigger import series
from lab.benchmarks.trigger.rules import RULES, Rule
from lab.benchmarks.trigger.series import Maker
from lab.output import table

GROWTHS = (1.25, 1.5, 2.0)
MINI_BATCHES = (1, 4, 8, 16)
FIRST = 64  # steps before the first planted spike: the slowest rule's warm-up
RATE = 0.02  # share of steps with a spike
SIZES = (3, 10, 100)
CAP = 10.0  # spike on a real series, and collapse, in multiples of the level
BACK = 1.5  # factor within which a threshold counts as restored


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the record."""
    options = Parser("trigger", __doc__)
    options.add_argument("--seeds", type=int, default=100, help="generated series of each kind (default: %(default)s)")
    options.add_argument("--series", type=Path, default=REPO / "docs" / "series", help="folder of real series")
    parsed = options.parse_args(arguments)
    run = measure(parsed.seeds, sorted(parsed.series.glob("*.json")))
    finish(parsed, run, markdown(run))
    return 0


def measure(num_seeds: int, files: list[Path]) -> dict[str, Any]:
    """Run every rule on every series and return the record.

    Args:
        num_seeds: number of generated series of each kind, with seeds 0, 1, ...
        files: real series.
    """
    seeds, collapses = range(num_seeds), list(itertools.product(GROWTHS, MINI_BATCHES))

    def scored(score: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        return {name: score(*given, make) for name, make in RULES.items()}

    run: dict[str, Any] = {"seeds": list(seeds), "rules": list(RULES), "real": [], "healthy": [], "collapses": []}
    for path in files:
        found = json.loads(path.read_text())
        rules = scored(score_real, [float(norm) for _, norm in found["series"]])
        run["real"].append({"name": path.stem, "source": found.get("source", ""), "rules": rules})
    for number, (kind, series_of) in enumerate(tqdm(series.HEALTHY.items(), "kinds")):
        run["healthy"].append({"name": kind, "rules": scored(score_kind, series_of, number, seeds)})
    for number, (growth, size) in enumerate(tqdm(collapses, "collapses")):
        rules = scored(score_collapse, growth, size, number, seeds)
        run["collapses"].append({"growth": growth, "mini_batches": size, "after": series.NUM_AFTER, "rules": rules})
    return run


# ---- a rule on a series


def thresholds(rule: Rule, norms: np.ndarray) -> np.ndarray:
    """Return the threshold before each norm, NaN if there was none; both (steps, mini-batches)."""
    found = np.full(norms.shape, np.nan)
    for step, row in enumerate(norms.tolist()):
        for position, norm in enumerate(row):
            threshold = rule.threshold(position)
            if threshold is not None:
                found[step, position] = threshold
            rule.observe(norm)
        rule.end_step(row)
    return found


def score_kind(kind: Maker, number: int, seeds: Sequence[int], make: Callable[[], Rule]) -> dict[str, Any]:
    """Return false flags on healthy series, and misses with planted spikes: median, mean and worst over seeds.

    False flags are flagged mini-batches per 1,000 trainer steps.
    """
    flags, misses = [], {size: [] for size in SIZES}
    for seed in seeds:
        healthy = kind(np.random.default_rng([number, seed]))
        is_flagged = healthy.norms > thresholds(make(), healthy.norms)
        flags.append(1000 * is_flagged.sum() / len(is_flagged))
        planted, factors = series.plant(healthy, np.random.default_rng([number, seed, 1]), RATE, FIRST)
        is_flagged = planted > thresholds(make(), planted)
        for size in SIZES:
            is_size = factors == size
            if is_size.any():
                misses[size].append(100 * (~is_flagged[is_size]).mean())
    return {"false_flags": _summary(flags), **{f"missed_x{size}": _summary(values) for size, values in misses.items()}}


def score_collapse(growth: float, size: int, number: int, seeds: Sequence[int], make: Callable[[], Rule]) -> dict:
    """Measure how a rule reacts to a collapse.

    ``unseen`` is the percentage of the collapse's norms over CAP times the healthy level that are not flagged, ``back``
    the number of steps until every position's threshold is within BACK of its earlier median of 64 steps; NUM_AFTER + 1
    if it never is.
    """
    first, last = series.NUM_HEALTHY, series.NUM_HEALTHY + series.GROWING
    unseen, back = [], []
    for seed in seeds:
        norms = series.collapse(np.random.default_rng([1000 + number, seed]), growth, size)
        found = thresholds(make(), norms)
        during, limit = norms[first:last], found[first:last]
        is_high = during > CAP
        unseen.append(100 * (~(during > limit))[is_high].mean())
        usual = np.nanmedian(found[first - 64 : first], axis=0)
        is_back = (np.abs(np.log(found[last + 1 :] / usual)) < np.log(BACK)).all(axis=1)
        back.append(1 + int(is_back.argmax()) if is_back.any() else series.NUM_AFTER + 1)
    return {"unseen": _summary(unseen), "back": _summary(back)}


def score_real(norms: Sequence[float], make: Callable[[], Rule]) -> dict[str, int]:
    """Count a real series' norms over CAP times the median of the 64 before, and the missed ones; and all other
    steps, and the flagged ones."""
    found = thresholds(make(), np.array(norms)[:, None])[:, 0]
    counted = {"over": 0, "missed": 0, "others": 0, "flagged": 0}
    for step, (norm, threshold) in enumerate(zip(norms, found, strict=True)):
        is_flagged = bool(norm > threshold)
        if step >= 16 and norm > CAP * median(norms[max(0, step - 64) : step]):
            counted["over"] += 1
            counted["missed"] += not is_flagged
        else:
            counted["others"] += 1
            counted["flagged"] += is_flagged
    return counted


def _summary(values: Sequence[float]) -> dict[str, float]:
    values = values or [np.nan]  # few seeds may plant nothing
    return {"median": float(np.median(values)), "mean": float(np.mean(values)), "worst": float(np.max(values))}


# ---- the record as tables


def markdown(run: dict[str, Any]) -> str:
    """Return all tables of a record."""
    rules, parts = run["rules"], list[str]()
    if run["real"]:
        rows = [_real_row(entry, rules) for entry in run["real"]]
        parts += ["### Real series", table([["series", "norms", "over 10 x", *rules], *rows])]
    titles = {"false_flags": "False flags per 1,000 healthy steps"}
    titles |= {f"missed_x{size}": f"Spikes of x {size} missed, in %" for size in (10, 3, 100)}
    for name, title in titles.items():
        rows = [[entry["name"], *(_cell(entry["rules"][rule][name]) for rule in rules)] for entry in run["healthy"]]
        parts += [f"### {title}", table([["series", *rules], *rows])]
    rows = [_collapse_row(entry, rules) for entry in run["collapses"]]
    parts += ["### Collapses", table([["growth a step", "mini-batches", *rules], *rows])]
    return "\n\n".join(parts)


def _real_row(entry: dict[str, Any], rules: list[str]) -> list[str]:
    counts = [entry["rules"][rule] for rule in rules]
    cells = [f"{each['missed']} missed, {100 * each['flagged'] / each['others']:.1f} % flagged" for each in counts]
    return [entry["name"], str(counts[0]["over"] + counts[0]["others"]), str(counts[0]["over"]), *cells]


def _collapse_row(entry: dict[str, Any], rules: list[str]) -> list[str]:
    cells = []
    for found in (entry["rules"][rule] for rule in rules):
        back = found["back"]["median"]
        after = f"back after {back:g}" if back <= entry["after"] else f"not back in {entry['after']}"
        cells.append(f"{found['unseen']['median']:.0f} % unseen, {after}")
    return [f"x {entry['growth']:g}", str(entry["mini_batches"]), *cells]


def _cell(summary: dict[str, float]) -> str:
    return f"{summary['median']:.1f} ({summary['mean']:.1f})"


if __name__ == "__main__":
    sys.exit(main())
