# SPDX-License-Identifier: Apache-2.0
"""The runs that scripts/make_logs.py has every tool write, and what was planted in each file."""

import math
import random

NORM, BOOM, STEPS = "actor/grad_norm", 47, 60
Rows = list[tuple[int, dict[str, float]]]
EXPLODES = ["Step 47: gradient norm 903,", "Reward fell from 0.6"]
ANSWERS: dict[str, dict] = {}


def row(step: int, boom: int | None, rng: random.Random, norm: float = 903.0) -> dict[str, float]:
    """A step's metrics by verl's names; from ``boom`` on the policy breaks."""
    since = step - boom if boom is not None and step > boom else 0
    return {
        NORM: norm if step == boom else round(0.488 * math.exp(rng.gauss(0, 0.12)), 5),
        "actor/entropy": round(0.31 * (1 + rng.gauss(0, 0.02)) + min(0.21 * since, 1.9), 5),
        "critic/score/mean": round(max(0.61 * (1 + rng.gauss(0, 0.02)) - 0.07 * since, 0.02), 5),
        "response_length/mean": round(240 * (1 + rng.gauss(0, 0.02)), 3),
    }


def story(kind: str = "explodes") -> Rows:
    """The rows of one kind of run, in the order in which they are logged."""
    rng = random.Random(kind)
    if kind == "resumed":  # the explosion is overwritten
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(41, 61)]
    if kind == "again":  # from the first step, into the same file
        return [(s, row(s, BOOM, rng)) for s in range(1, 53)] + [(s, row(s, None, rng)) for s in range(1, 61)]
    steps, boom, norm = {
        "explodes": (60, BOOM, 903.0),
        "calm": (60, None, 0.0),
        "warmup": (40, 12, 903.0),
        "short": (7, 5, 903.0),
        "nan": (60, BOOM, math.nan),
        "inf": (60, BOOM, math.inf),
        "first": (60, 1, 903.0),
        "last": (47, BOOM, 903.0),
    }[kind]
    return [(s, row(s, boom, rng, norm)) for s in range(1, steps + 1)]


def renamed(rows: Rows, **names: str) -> Rows:
    """The rows with the names of another trainer."""
    known = {NORM: "norm", "critic/score/mean": "reward", "actor/entropy": "entropy", "response_length/mean": "length"}
    return [(s, {names[known[n]]: v for n, v in values.items() if known[n] in names}) for s, values in rows]


def answer(name: str, form: str, *says: str, **more) -> str:
    """Note what was planted in a file or folder."""
    ANSWERS[name] = {"format": form, "says": list(says), **more}
    return name
