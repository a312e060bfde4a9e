# SPDX-License-Identifier: Apache-2.0
"""Which cells a run measures: the scenario battery, then one thing varied at a time."""

import itertools
from dataclasses import dataclass, replace

from benchmarks.localization.pretrained import NAME
from benchmarks.localization.scenarios import PLANTS, SCENARIOS, WHOLE
from benchmarks.localization.worker import UNTRACKED
from tests.bare import AGGREGATIONS

ALL = ("published", "bisect", "share", "sketch", "auto", UNTRACKED)
PAIR = ("published", "auto")
MAIN = ("published", "auto", UNTRACKED)
DTYPES = ("float32", "bfloat16")
LARGE_SCENARIOS = ("single_10", "three", "eight", "cancel", "cluster_16", "sequence", "rare", "jacobian")
HALF_SCENARIOS = ("single_10", "single_4", "three", "cancel")


@dataclass(frozen=True)
class Cell:
    """One spiked step and the strategies that search it."""

    sweep: str
    scenario: str
    tokens: int = 2048
    ranks: int = 2
    micro_batches: int = 4
    model: str = "S"
    dtype: str = "float32"
    masters: str = "float32"
    """What the weights and their gradient are kept in."""
    seed: int = 0
    strategies: tuple[str, ...] = ALL
    count: int | None = None
    """Planted culprits of size ``kappa`` each, in scenario ``loud``."""
    kappa: float = 10.0
    aggregation: str = AGGREGATIONS[0]
    """Of the loss."""
    has_history: bool = False
    """Whether the search is told what is typical of the run: the median coefficient of the healthy batch."""


def quick() -> list[Cell]:
    """About two minutes on two free cores."""
    cells = [Cell("battery", name, tokens=512) for name in SCENARIOS]
    cells += [Cell("battery", name, tokens=512, dtype="bfloat16", strategies=PAIR) for name in SCENARIOS]
    cells += [Cell("tokens", "single_10", tokens=tokens, strategies=MAIN) for tokens in (128, 2048)]
    return _ordered(cells)


def full(seeds: int = 3) -> list[Cell]:
    """The figures of docs/benchmarks.md: all strategies once, the main pair on every seed."""
    cells = [
        Cell(
            "battery",
            name,
            dtype=dtype,
            seed=seed,
            tokens=1024,
            strategies=ALL if (seed, dtype) == (0, "float32") else PAIR,
        )
        for seed in range(seeds)
        for dtype in DTYPES
        for name in SCENARIOS
    ]
    half = dict(dtype="bfloat16", masters="bfloat16", tokens=1024, strategies=PAIR)
    cells += [Cell("masters", name, seed=seed, **half) for seed in range(seeds) for name in HALF_SCENARIOS]
    for tokens in (128, 512, 2048, 4096, 8192, 16384):
        cells.append(Cell("tokens", "single_10", tokens=tokens, strategies=MAIN))
    for micro_batches in (1, 2, 4, 8):
        cells.append(
            Cell(
                "micro_batches",
                "single_10",
                tokens=4096,
                micro_batches=micro_batches,
                strategies=MAIN,
            )
        )
    for kappa in (5.0, 10.0):
        for count in (1, 2, 3, 5, 8):
            cells.append(Cell("culprits", "loud", tokens=4096, count=count, kappa=kappa, strategies=PAIR))
    for ranks in (1, 2, 4):
        cells.append(Cell("ranks", "three", tokens=1024, ranks=ranks, strategies=PAIR))
    for model in ("XS", "S", "M"):
        cells.append(Cell("model", "three", tokens=1024, model=model, strategies=PAIR))
    return _ordered(cells + plants(min(seeds, 2)))


def plants(seeds: int = 2) -> list[Cell]:
    """Culprits that the model is sure of, and batches without one; `published` always names a token."""
    cells = []
    for seed, dtype, name in itertools.product(range(seeds), DTYPES, PLANTS):
        cell = Cell("plants", name, tokens=1024, dtype=dtype, seed=seed, strategies=("auto",))
        forms = itertools.product(AGGREGATIONS, (False, True)) if name in WHOLE else [(cell.aggregation, False)]
        cells += [replace(cell, aggregation=aggregation, has_history=is_told) for aggregation, is_told in forms]
    return cells


def pretrained(tokens: int = 512, ranks: int = 2) -> list[Cell]:
    """The battery on a pretrained language model; half an hour on two free cores, some minutes of few tokens on one."""
    return [
        # the published search costs the same f whatever the spike is, two thirds of a cell's time
        Cell("pretrained", name, tokens, ranks, model=NAME, dtype=dtype, strategies=PAIR[name != "single_10" :])
        for dtype in DTYPES
        for name in LARGE_SCENARIOS
    ]


def _ordered(cells: list[Cell]) -> list[Cell]:
    """Cells that share ranks, model and history stand together; the battery comes first."""
    return sorted(
        cells,
        key=lambda c: (
            c.sweep != "battery",
            c.ranks != 2,
            c.ranks,
            c.model,
            c.tokens,
            c.seed,
            c.dtype,
            c.masters,
            c.aggregation,
        ),
    )
