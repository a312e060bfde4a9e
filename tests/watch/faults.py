# SPDX-License-Identifier: Apache-2.0
"""One step of a loss of each kind on a tiny model, or on one that is given, with one token or pair spoiled.

Shapes: R rows, T positions; of pairs, R / 2 chosen rows and then as many rejected ones.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradloc
from gradloc import token_log_probs
from tests.toy_model.model import build
from tests.world import DEVICE

ROWS, EACH, T, VOCABULARY = 8, 2, 10, 96
TINY = partial(build, "tiny")


def step_of(
    kind: str,
    seed: int,
    folder: Path,
    is_spoiled: bool = True,
    make: Callable[[int], torch.nn.Module] = TINY,
    text: torch.Tensor | None = None,
    loudness: float = 1.0,
) -> tuple[tuple[int, int], float]:
    """One optimizer step; row and position that were spoiled, and the norm of the gradient that was taken.

    Args:
        kind: ``sft`` (packed documents), ``weighted``, ``dpo``, ``grpo``, ``k1`` or ``k3`` (distillation).
        folder: of the run.
        is_spoiled: whether a place is multiplied with :data:`WORTH`.
        make: the model of a seed.
        text: token ids that rows are cut from; None: random ones.
        loudness: times a tiny model's the norm of a healthy step is.
    """
    generator = torch.Generator().manual_seed(seed)
    model = make(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = gradloc.Watch(
        model, optimizer, folder, action="mask", trigger={"tau": loudness * TAUS[kind] * math.sqrt(80)}
    )
    ids = torch.randint(1, VOCABULARY, (ROWS, T + 1), generator=generator)
    if text is not None:
        starts = torch.randint(len(text) - T, (ROWS, 1), generator=generator)
        ids = text[starts + torch.arange(T + 1)]
    ids, mask = ids.to(DEVICE), torch.ones(ROWS, T, dtype=torch.long, device=DEVICE)
    if kind == "sft":
        mask[:, 4] = 0  # packed: a document's first token is no target
    row, position = random.Random(seed).randrange(ROWS), random.Random(seed + 1).choice([0, 2, 5, 9])
    spoiled = torch.ones(ROWS, T, device=DEVICE)
    spoiled[row, position] = WORTH.get(kind, 3e3) if is_spoiled else 1.0
    with torch.no_grad():
        old = token_log_probs(model(ids[:, :-1], T), ids[:, 1:])
        if kind in ("k1", "k3"):
            of_teacher = token_log_probs(make(seed + 100)(ids[:, :-1], T), ids[:, 1:])
    advantages = torch.randn(ROWS, 1, generator=generator).to(DEVICE) * spoiled
    optimizer.zero_grad()
    for at in range(0, ROWS // 2 if kind == "dpo" else ROWS, EACH):
        rows: Any = slice(at, at + EACH)
        if kind == "dpo":  # a pair's halves in one call, as one forward
            rows = torch.tensor([*range(at, at + EACH), *range(at + ROWS // 2, at + ROWS // 2 + EACH)])
        x, kept = ids[rows], mask[rows]

        def forward() -> torch.Tensor:
            return token_log_probs(model(x[:, :-1], T), x[:, 1:])  # noqa: B023 (as people write it)

        known = {"advantages": advantages[rows], "old_log_probs": old[rows]} if kind == "grpo" else {}
        now = watch.log_probs(forward, kept, x[:, 1:], **known)
        if kind == "dpo":
            ratio = ((now - old[rows]) * spoiled[rows]).sum(-1)
            losses = -torch.nn.functional.logsigmoid(0.1 * (ratio[:EACH] - ratio[EACH:]))
        elif kind == "grpo":
            losses = -advantages[rows] * (now - old[rows]).exp()
        elif kind in ("k1", "k3"):
            gap = (of_teacher[rows] - now) * spoiled[rows]
            losses = -gap if kind == "k1" else gap.exp() - 1 - gap
            losses = losses.square() if kind == "k1" else losses
        else:
            losses = -now * spoiled[rows]
        (losses if kind == "dpo" else losses * kept).sum().div(mask.sum()).backward()
    norm = watch.clip_grad_norm_(1.0)
    optimizer.step()
    named_row = row if kind != "dpo" else _row_in_pairs(row)
    return (named_row, position), float(norm)


def _row_in_pairs(row: int) -> int:
    """Where a row comes when pairs are dealt out together."""
    half, at = divmod(row, ROWS // 2)
    return at // EACH * 2 * EACH + half * EACH + at % EACH


TAUS = {"sft": 2.5, "weighted": 2.5, "dpo": 1.0, "grpo": 5.0, "k1": 4.0, "k3": 3.0}
"""A norm between a healthy step's and a spoiled one's."""
WORTH = {"k1": 30.0, "k3": 8.0}
"""What the spoiled place is multiplied with: in distillation the distance from the teacher is."""
