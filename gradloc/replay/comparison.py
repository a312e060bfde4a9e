# SPDX-License-Identifier: Apache-2.0
"""The replay compared with the event: culprits, weights, and the oracle's word on every token.

Culprits are compared by their place in the event, since a replay may deal the micro-batches out differently.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..core.gradients import GradientSpace
from ..core.ranks import Ranks
from ..core.selection import Part
from ..loop.fingerprint import differs, fingerprint, is_other_model
from ..search.find import Finding
from ..search.task import Task
from .bundle import Bundle, Entry, ReplayError

_NUM_TOP = 10  # tokens in the oracle's table

Places = list[list[Entry | None]]
"""Per process, per micro-batch there: which of the event's."""


@dataclass(frozen=True)
class Named:
    """A culprit, by its place in the event."""

    rank: int
    micro_batch: int
    micro_batch_row: int
    positions: tuple[int, ...]
    span: str
    norm: float | None
    share: float | None

    @property
    def tokens(self) -> set[tuple[int, int, int, int]]:
        return {(self.rank, self.micro_batch, self.micro_batch_row, position) for position in self.positions}


# ---- culprits


def named_by_event(bundle: Bundle) -> list[Named] | None:
    """The event's culprits; None where the bundle has no list of them, not even an empty one."""
    if not bundle.names_culprits:
        return None
    entries = {(entry.rank, entry.micro_batch): entry for entry in bundle.layout}
    named = []
    for number, culprit in enumerate(bundle.event.culprits):
        where, row, positions = (culprit.rank, culprit.micro_batch), culprit.micro_batch_row, culprit.positions
        if None in (*where, row) or not positions:
            raise ReplayError(
                f"meta.json: event.culprits[{number}] must hold rank, micro_batch, micro_batch_row and positions."
            )
        mask = bundle.token_mask(entries[where]) if where in entries else torch.zeros(0, 0)
        if not (0 <= row < mask.shape[0] and all(0 <= p < mask.shape[1] and mask[row, p] for p in positions)):
            raise ReplayError(f"meta.json: event.culprits[{number}] is at no response token of the bundle.")
        named.append(Named(*where, row, positions, culprit.span, culprit.grad_norm, culprit.share))
    return named


def named_by_replay(finding: Finding, bundle: Bundle, places: Places) -> list[Named]:
    """The culprits that the replay's search has named."""
    named = []
    for culprit in finding.result.culprits:
        first = culprit.tokens[0]
        entry = places[first.rank][first.micro_batch]
        tokens = bundle.token_mask(entry).nonzero()[[token.index for token in culprit.tokens]].tolist()
        row, positions = tokens[0][0], tuple(position for _, position in tokens)
        named.append(Named(entry.rank, entry.micro_batch, row, positions, culprit.span, culprit.norm, culprit.share))
    return named


def verdict(expected: list[Named] | None, replayed: list[Named]) -> str:
    """``same`` where both name the very same tokens, however they are grouped into spans."""
    if expected is None:
        return "nothing_to_compare"
    of_event, of_replay = (set().union(*(named.tokens for named in side)) for side in (expected, replayed))
    return "same" if of_event == of_replay else "different"


def side_by_side(expected: list[Named], replayed: list[Named]) -> list[dict[str, Any]]:
    """One row per place, with what each side says of it; None where it does not name it."""
    rows: dict[tuple, dict[str, Any]] = {}
    for side, culprits in (("event", expected), ("replay", replayed)):
        for named in culprits:
            place = {name: getattr(named, name) for name in ("rank", "micro_batch", "micro_batch_row", "positions")}
            row = rows.setdefault(
                tuple(place.values()),
                {**place, "positions": list(named.positions), "span": named.span, "event": None, "replay": None},
            )
            row[side] = {"grad_norm": named.norm, "share": named.share}
    return list(rows.values())


# ---- weights


def compare_weights(bundle: Bundle, space: GradientSpace, model_path: str) -> dict[str, str]:
    """Whether the weights are the event's, by its fingerprint; a ReplayError if the model is another altogether."""
    expected, at = bundle.meta.fingerprint, bundle.event.step
    if expected is None:  # written by hand
        return {"verdict": "unknown", "sentence": "The bundle has no fingerprint of the weights to compare."}
    given = fingerprint(space)
    other = is_other_model(expected, given)
    if other is not None:
        raise ReplayError(f"The model at {model_path} is not the event's: {other}.")
    difference = differs(expected, given)
    if difference is None:
        return {"verdict": "same", "sentence": "The weights are those of the event, by their fingerprint."}
    if at.mini_batch or at.epoch:
        difference += (
            f" The event came at epoch {at.epoch}, mini-batch {at.mini_batch} of its step, so after the "
            "step's first update: no checkpoint of a step has its weights, evidence.checkpoint=before_step saves them."
        )
    return {"verdict": "different", "sentence": difference}


def refuse_nan(step: Any, ranks: Ranks, bundle: Bundle) -> None:
    """Refuse weights that give NaN log-probs where the event had none."""
    counts = [int(step.recorded(i).log_prob[step.token_mask(i)].isnan().sum()) for i in range(len(step.places))]
    (total,) = ranks.sum([sum(counts)])
    if total and bundle.event.trigger.kind != "non_finite":
        raise ReplayError(f"With the given weights the log-probs of {int(total)} response tokens are NaN.")


# ---- the oracle


def ask_oracle(task: Task, bundle: Bundle, places: Places, replayed: list[Named]) -> dict[str, Any]:
    """Every token's gradient norm and share by a probe of its own, and how the strategy did against that."""
    space, named = task.prober.space, set().union(*(culprit.tokens for culprit in replayed))
    alone = set().union(*(culprit.tokens for culprit in replayed if len(culprit.positions) == 1))
    tokens, square = [], task.spike.grad_norm**2
    for rank, of_process in enumerate(places):
        for index, entry in enumerate(of_process):
            flat = [] if entry is None else bundle.token_mask(entry).nonzero().tolist()
            for number, (row, position) in enumerate(flat):
                norm = task.prober.measure(Part(index, rank, rank + 1, number, number + 1)).norm
                dot = float(space.dots(space.current(), task.gradient).sum())
                share = dot / square if square > 0 else math.nan
                tokens.append((norm, share, (entry.rank, entry.micro_batch, row, position)))
    culprits = {token for norm, _, token in tokens if not norm < task.culprit_norm}
    tokens.sort(key=lambda item: (item[0] == item[0], -item[0], item[2]))  # what is not a number comes first
    return {
        "threshold": task.culprit_norm,
        "num_tokens": len(tokens),
        "num_culprits": len(culprits),
        "recall": len(culprits & named) / len(culprits) if culprits else None,
        "missed": sorted(culprits - named),
        "false_positives": sorted(alone - culprits),
        "top": [
            {
                **dict(zip(("rank", "micro_batch", "micro_batch_row", "position"), token, strict=True)),
                "grad_norm": norm,
                "share": share,
                "is_named": token in named,
            }
            for norm, share, token in tokens[:_NUM_TOP]
        ],
    }
