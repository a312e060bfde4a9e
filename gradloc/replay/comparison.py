# SPDX-License-Identifier: Apache-2.0
"""The replay compared with the event: culprits, weights, and the oracle's word on every token."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..core.gradients import GradientSpace
from ..core.selection import Part
from ..loop.fingerprint import differs, fingerprint, is_other_model
from ..search.task import Span, Task
from .bundle import Bundle, ReplayError, check
from .step import ReplayStep

_NUM_TOP = 10  # tokens in the oracle's table
_PLACE = ("rank", "micro_batch", "micro_batch_row", "positions")

Named = dict[tuple[int, int, int, tuple[int, ...]], dict[str, Any]]
"""Culprits by their place in the event (rank, micro-batch, row there, response positions), and what is said of each."""


def named_by_event(bundle: Bundle) -> Named:
    """Return the event's culprits."""
    masks = {(entry.rank, entry.micro_batch): bundle.token_mask(entry) for entry in bundle.layout}
    tokens = {(*where, *place) for where, mask in masks.items() for place in mask.nonzero().tolist()}
    named: Named = {}
    for number, culprit in enumerate(bundle.event.culprits):
        place = (culprit.rank, culprit.micro_batch, culprit.micro_batch_row, culprit.positions)
        is_there = culprit.positions and {(*place[:3], position) for position in culprit.positions} <= tokens
        check(is_there, f"meta.json: event.culprits[{number}] is at no response token of the bundle.")
        named[place] = {"span": culprit.span, "grad_norm": culprit.grad_norm, "share": culprit.share}  # type: ignore
    return named


def named_by_replay(culprits: Iterable[Span], bundle: Bundle) -> Named:
    """Return the culprits that the replay's search has named."""
    named: Named = {}
    for culprit in culprits:
        entry = bundle.layout[culprit.tokens[0].micro_batch]
        places = bundle.token_mask(entry).nonzero()[[token.index for token in culprit.tokens]].tolist()
        place = (entry.rank, entry.micro_batch, places[0][0], tuple(position for _, position in places))
        named[place] = {"span": culprit.span, "grad_norm": culprit.norm, "share": culprit.share}
    return named


def tokens_of(named: Named) -> set[tuple[int, ...]]:
    return {(*place, position) for *place, positions in named for position in positions}


def side_by_side(expected: Named, replayed: Named) -> list[dict[str, Any]]:
    """Return one row per place, with what each side says of it; None where it does not name it."""
    return [
        {**_placed(place), "span": said["span"], "event": expected.get(place), "replay": replayed.get(place)}
        for place, said in {**expected, **replayed}.items()
    ]


def _placed(place: tuple) -> dict[str, Any]:
    return {**dict(zip(_PLACE, place, strict=True)), "positions": list(place[-1])}


def compare_weights(bundle: Bundle, space: GradientSpace, model_path: str) -> dict[str, str]:
    """Return whether the weights are the event's, by its fingerprint; a ReplayError if the model is another
    altogether.
    """
    expected, at = bundle.meta.fingerprint, bundle.event.step
    if expected is None:  # written by hand
        return {"verdict": "unknown", "sentence": "The bundle has no fingerprint of the weights to compare."}
    given = fingerprint(space)
    if other := is_other_model(expected, given):
        raise ReplayError(f"The model at {model_path} is not the event's: {other}.")
    difference = differs(expected, given)
    if difference is None:
        return {"verdict": "same", "sentence": "The weights are those of the event, by their fingerprint."}
    if at.mini_batch or at.epoch:
        difference += " The event came after its step's first update, so no checkpoint of a step has its weights: "
        difference += "evidence.checkpoint=before_step saves them."
    return {"verdict": "different", "sentence": difference}


def refuse_nan(bundle: Bundle, step: ReplayStep) -> None:
    """Refuse weights that give NaN log-probs where the event had none."""
    log_probs = [step.recorded(index).log_prob[step.token_mask(index)] for index in range(step.num_micro_batches)]
    number = int(torch.cat(log_probs).isnan().sum())
    is_events = bundle.event.trigger.kind == "non_finite"
    check(not number or is_events, f"With the given weights the log-probs of {number} response tokens are NaN.")


def ask_oracle(task: Task, bundle: Bundle, replayed: Named) -> dict[str, Any]:
    """Return every token's gradient norm and share by a probe of its own, and how the strategy did against that."""
    space, named = task.prober.space, tokens_of(replayed)
    alone = tokens_of({place: said for place, said in replayed.items() if len(place[-1]) == 1})
    found, square = [], task.spike.grad_norm**2
    for index, entry in enumerate(bundle.layout):
        for number, (row, position) in enumerate(bundle.token_mask(entry).nonzero().tolist()):
            norm = task.prober.measure(Part(index, 0, 1, number, number + 1)).norm
            dot = float(space.dots(space.current(), task.gradient).sum())
            share = dot / square if square > 0 else math.nan
            place = (entry.rank, entry.micro_batch, row)
            said = {"grad_norm": norm, "share": share, "is_named": (*place, position) in named}
            found.append(((*place, position), {**_placed((*place, (position,))), **said}))
    culprits = {token for token, said in found if not said["grad_norm"] < task.culprit_norm}
    found.sort(key=lambda item: (not math.isnan(item[1]["grad_norm"]), -item[1]["grad_norm"], item[0]))
    return {
        "threshold": task.culprit_norm,
        "num_tokens": len(found),
        "num_culprits": len(culprits),
        "recall": len(culprits & named) / len(culprits) if culprits else None,
        "missed": sorted(culprits - named),
        "false_positives": sorted(alone - culprits),
        "top": [said for _, said in found[:_NUM_TOP]],
    }
