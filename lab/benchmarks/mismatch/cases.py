# SPDX-License-Identifier: Apache-2.0
"""Make batches with a known mismatch from a pool of real forwards."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from gradloc.mismatch import Columns, columns

SHORTEST = 40  # minimum tokens of a row
PRECISIONS = {
    "bfloat16, decode with a cache and whole rows": ("rollout_main_1", "bf16_main_1"),
    "bfloat16 and float32": ("rollout_main_1", "f32_main_1"),
    "bfloat16, two kernels": ("bf16_eager_main_1", "bf16_main_1"),
    "float32, two kernels": ("f32_eager_main_1", "f32_main_1"),
    "float16 and float32": ("fp16_main_1", "f32_main_1"),
    "float16 and bfloat16": ("fp16_main_1", "bf16_main_1"),
}
"""Precisions of two forwards without a fault -> their columns in a pool."""


@dataclass(frozen=True)
class Rows:
    """R rows of T tokens: log-probs of the engine (b) and the trainer (a), the mask, and each row's prompt and ids."""

    b: np.ndarray
    a: np.ndarray
    mask: np.ndarray
    ids: np.ndarray
    known: dict = field(default_factory=dict)

    def columns(self, **more) -> Columns:
        """Return the rows as the package's `Columns`."""
        return columns(self.b, self.a, self.mask, **{"ids": self.ids, **self.known, **more})


@cache
def load(pool: Path | str) -> dict[str, np.ndarray]:
    """Return a pool's columns by name; the file is read once."""
    with np.load(pool) as found:
        return {name: found[name] for name in found.files}


class Maker:
    """Makes the cases of a pool, one method for each kind."""

    def __init__(self, pool: Path | str, seed: int, rows: int = 44):
        self.pool = load(pool)
        self.random = np.random.default_rng(seed)
        self.rows = rows

    def healthy(self, engine: str = "rollout_main_1", trainer: str = "", ids: str = "ids_main",
                in_order: bool = False) -> Rows:  # fmt: skip
        """Return rows of the pool in random order, cut to random lengths."""
        trainer = trainer or str(self.random.choice(["bf16_main_1", "f32_main_1"]))
        if trainer not in self.pool:
            trainer = "bf16_main_1"
        chosen = self.random.permutation(len(self.pool["group"]))[: self.rows]
        if in_order:
            chosen = np.arange(len(self.pool["group"]))
        b, a, tokens = (self.pool[name][chosen].copy() for name in (engine, trainer, ids))
        lengths = self.random.integers(SHORTEST, b.shape[1] + 1, len(b))
        mask = np.arange(b.shape[1]) < lengths[:, None]
        known = {"group": list(self.pool["group"][chosen]), "prompt": list(self.pool["prompt_length"][chosen])}
        self.chosen = chosen
        return Rows(b.astype(float), a.astype(float), mask, tokens, known)

    def noise(self) -> Rows:
        return self.healthy(*[*PRECISIONS.values()][self.random.integers(len(PRECISIONS))])

    def truncated(self, rows: Rows | None = None) -> Rows:
        rows = rows or self.healthy()
        cuts = [name[5:] for name in self.pool if name.startswith("mass_")]
        cut = str(self.random.choice(cuts))
        kept, mass = (self.pool[f"{name}_{cut}"][self.chosen] for name in ("kept", "mass"))
        return replace(rows, b=rows.b - np.log(mass), mask=rows.mask & (kept > 0.5))

    def temperature(self) -> Rows:
        t = str(self.random.choice(["0.6", "0.8", "1.2"]))
        raw, own = ("1", t) if self.random.random() < 0.5 else (t, "1")
        return self.healthy(f"rollout_t{t}_{raw}", f"bf16_t{t}_{own}", f"ids_t{t}")

    def shift(self, rows: Rows | None = None) -> Rows:
        rows = rows or self.healthy()
        lag, b = int(self.random.choice([-1, 1])), rows.b.copy()
        moved = np.roll(b, lag, 1)
        whole = self.random.random() < 0.5
        begins = np.zeros(len(b), int) if whole else self.random.integers(6, SHORTEST - 15, len(b))
        if not whole:
            begins[self.random.random(len(b)) < 0.4] = b.shape[1]
        places = np.arange(b.shape[1])
        there = places >= begins[:, None]
        inside = (places > 0) & (places < b.shape[1] - 1)
        return replace(rows, b=np.where(there, moved, b), mask=rows.mask & inside)

    def never_sampled(self) -> Rows:
        if self.random.random() < 0.5:
            rows = self.healthy(trainer="bf16_main_1")
            return replace(rows, b=self.pool["split_rollout"][self.chosen].astype(float))
        rows = self.healthy("tool_rollout", "tool_trainer")
        marks = self.pool["tool_marks"][self.chosen] > 0.5
        marks &= (self.random.random(len(marks)) < 0.6)[:, None]
        others = (self.pool["tool_marks"][self.chosen] > 0.5) & ~marks
        filled = [0.0, -1.0, np.nan][self.random.integers(3)]
        return replace(rows, b=np.where(marks, filled, rows.b), mask=rows.mask & ~others)

    def stale(self) -> Rows:
        return self.healthy(trainer=str(self.random.choice(["stale4_main_1", "stale2_main_1"])))

    def other_weights(self) -> Rows:
        return self.healthy(trainer=str(self.random.choice(["other_main_1", "partial_main_1"])))

    def few_rows(self, rows: Rows | None = None, is_template: bool = False) -> Rows:
        rows = rows or self.healthy()
        bad = np.isin(rows.known["group"], self.random.choice(12, self.random.integers(2, 5), replace=False))
        is_cache = not is_template and self.random.random() < 0.5
        a, b = ("bf16_cache_1", "rollout_cache_1") if is_cache else ("template_main_1", "rollout_main_1")
        a, b = (np.where(bad[:, None], self.pool[name][self.chosen], old) for name, old in ((a, rows.a), (b, rows.b)))
        return replace(rows, a=a, b=b)

    def padding(self) -> Rows:
        return self.healthy(trainer=str(self.random.choice(["packed_main_1", "padded_main_1"])), in_order=True)

    def routing(self) -> Rows:
        return self.healthy(trainer="routed_main_1")

    def tail(self, rows: Rows | None = None) -> Rows:
        rows = rows or self.healthy()
        least = 10.0 ** -self.random.uniform(3.0, 4.5)
        if self.random.random() < 0.5:
            return replace(rows, a=np.log(np.exp(rows.a) + least))
        return replace(rows, b=np.maximum(rows.b, np.log(least)))

    def two(self) -> tuple[str, Rows]:
        """Return the names of two kinds, and a batch with both at once."""
        pairs: list[tuple[str, str, Callable[[], Rows]]] = [
            ("temperature", "shift", lambda: self.shift(self.temperature())),
            ("temperature", "tail", lambda: self.tail(self.temperature())),
            ("truncated", "shift", lambda: self.shift(self.truncated())),
            ("stale", "shift", lambda: self.shift(self.stale())),
            ("other_weights", "shift", lambda: self.shift(self.other_weights())),
            ("truncated", "few_rows", lambda: self.truncated(self.few_rows(is_template=True))),
            ("truncated", "other_weights", lambda: self.truncated(self.other_weights())),
            ("stale", "few_rows", lambda: self.few_rows(self.stale(), is_template=True)),
            ("routing", "shift", lambda: self.shift(self.routing())),
        ]
        first, second, make = pairs[self.random.integers(len(pairs))]
        return " + ".join(sorted((first, second))), make()


KINDS = ("noise", "truncated", "temperature", "shift", "never_sampled", "stale", "other_weights", "few_rows",
         "padding", "routing", "tail")  # fmt: skip
