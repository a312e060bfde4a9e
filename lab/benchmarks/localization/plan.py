# SPDX-License-Identifier: Apache-2.0
"""Which cells a run measures: the scenario battery, then one thing varied at a time."""

import itertools
from dataclasses import dataclass, replace

from lab.benchmarks.localization.pretrained import NAME
from lab.benchmarks.localization.scenarios import PLANTS, SCENARIOS, WHOLE
from tests.toy_model import AGGREGATIONS, Loss

UNTRACKED = "auto_untracked"
"""``auto`` where the running norm after each micro-batch was not noted."""
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

    @property
    def loss(self) -> Loss:
        """Of the step."""
        return Loss(aggregation=self.aggregation)


def quick() -> list[Cell]:
    """About two minutes on two free cores."""
    cells = [Cell("battery", name, tokens=512) for name in SCENARIOS]
    cells += [Cell("battery", name, tokens=512, dtype="bfloat16", strategies=PAIR) for name in SCENARIOS]
    cells += [Cell("tokens", "single_10", tokens=tokens, strategies=MAIN) for tokens in (128, 2048)]
    return _ordered(cells)


def full(seeds: int = 3) -> list[Cell]:
    """The figures of docs/benchmarks.md: all strategies once, the main pair on every seed."""
    cells = []
    for seed, dtype, name in itertools.product(range(seeds), DTYPES, SCENARIOS):
        strategies = ALL if (seed, dtype) == (0, "float32") else PAIR
        cells.append(Cell("battery", name, dtype=dtype, seed=seed, tokens=1024, strategies=strategies))
    half = dict(dtype="bfloat16", masters="bfloat16", tokens=1024, strategies=PAIR)
    cells += [Cell("masters", name, seed=seed, **half) for seed in range(seeds) for name in HALF_SCENARIOS]
    cells += [Cell("tokens", "single_10", tokens=n, strategies=MAIN) for n in (128, 512, 2048, 4096, 8192, 16384)]
    cells += [Cell("micro_batches", "single_10", 4096, micro_batches=m, strategies=MAIN) for m in (1, 2, 4, 8)]
    for kappa, count in itertools.product((5.0, 10.0), (1, 2, 3, 5, 8)):
        cells.append(Cell("culprits", "loud", tokens=4096, count=count, kappa=kappa, strategies=PAIR))
    cells += [Cell("ranks", "three", tokens=1024, ranks=ranks, strategies=PAIR) for ranks in (1, 2, 4)]
    cells += [Cell("model", "three", tokens=1024, model=model, strategies=PAIR) for model in ("XS", "S", "M")]
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

    def key(c: Cell) -> tuple:
        kind = c.sweep != "battery", c.ranks != 2
        return *kind, c.ranks, c.model, c.tokens, c.seed, c.dtype, c.masters, c.aggregation

    return sorted(cells, key=key)
