# SPDX-License-Identifier: Apache-2.0
"""One event as the page's template wants it, with everything worked out beforehand."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...evidence.numbers import number, percent
from ...evidence.record import Culprit, Event
from ..figures import curves as figures
from ..runs import advice, searchpath, tokens
from ..runs.events import bundle_folder, read_sequences
from ..text import (
    one_line,
    plural,
    replay_command,
    span,
    times,
    visible,
)
from .shading import Shades, shade

CULPRITS = 40
"""Culprits written out per event; the rest are counted."""

CERTIFICATES = {
    "explained": "explained: without the culprits the step is healthy",
    "not_explained": "not explained: without the culprits the step still spikes",
    "undecided": "undecided",
}
ACTIONS = {
    "observe": "observe: the optimizer took the step as if nobody had looked",
    "mask": "mask: the optimizer took the step without the culprits",
    "skip": "skip: the optimizer took no step",
    "abort": "abort: the run was stopped",
}


@dataclass
class EventView:
    """What the template shows of one event."""

    event: Event
    verdict: str
    title: str
    excess: str
    """How many times the threshold the norm is, as text."""
    culprits: list[dict[str, Any]]
    num_hidden_culprits: int
    causes: list[tuple[advice.Advice, list[dict[str, Any]]]]
    search_cost: str
    certificate: str
    action: str
    replay: str | None
    layer_note: str | None
    path: list[searchpath.Node]
    num_hidden_parts: int
    sequences: list[tokens.TokenView] = field(default_factory=list)
    shades: list[Shades] = field(default_factory=list)
    token_note: str | None = None
    heat: str | None = None
    is_heat_whole: bool = True
    layers: str | None = None

    @property
    def default(self) -> str:
        """Name of the measure that shades at first."""
        return self.shades[0].measure.name if self.shades else ""


def plain_view(event: Event, root: Path) -> EventView:
    """The event without pictures and token arrays: all that a long list of events can afford.

    Args:
        event: the event.
        root: folder of events.jsonl, as the user named it; the replay command is relative to it.
    """
    shown = sorted(event.culprits, key=_weight, reverse=True)
    written = [describe(culprit) for culprit in shown[:CULPRITS]]
    path, num_hidden = searchpath.tree(event.search)
    folder = bundle_folder(root, event)
    excess = times(event.trigger.grad_norm, event.trigger.threshold)
    return EventView(
        event=event,
        verdict=visible(event.verdict) if event.verdict else "",
        title=f"Step {event.step.global_step}, mini-batch {event.step.mini_batch}",
        excess=number(event.trigger.grad_norm) if excess is None else f"{number(excess, 3)}×",
        culprits=written,
        num_hidden_culprits=max(len(shown) - CULPRITS, 0),
        causes=_causes(written),
        search_cost=searchpath.cost(event.search),
        certificate=CERTIFICATES.get(event.certificate.verdict, event.certificate.verdict),
        action=ACTIONS.get(event.action.taken, event.action.taken),
        replay=replay_command(str(folder)) if folder is not None and folder.is_dir() else None,
        layer_note=_layer_note(event),
        path=path,
        num_hidden_parts=num_hidden,
    )


def full_view(event: Event, root: Path, name: str, budget: int, shown: int) -> tuple[EventView, str | None]:
    """The event with pictures and its sequences token by token.

    Args:
        event: the event.
        root: folder of events.jsonl.
        name: prefix for ids, unique on the page.
        budget: tokens that the page can carry of this event.
        shown: tokens that it can show at first.

    Returns:
        The view, and a sentence when the sequences could not be read.
    """
    made = plain_view(event, root)
    sequences, note = read_sequences(root, event)
    made.token_note = note
    made.shades = shade(sequences)
    count = max(len(sequences), 1)
    made.sequences = [
        tokens.view(sequence, event.culprits, budget // count, max(shown // count, 20)) for sequence in sequences
    ]
    heat = figures.heat_map(event, f"{name}-heat")
    if heat is not None:
        made.heat, made.is_heat_whole = heat
    made.layers = figures.layer_bars(event, f"{name}-layers")
    return made, note


def severity(event: Event) -> float:
    """How bad a spike is: its norm over its threshold; one that is not finite is worst."""
    norm, threshold = event.trigger.grad_norm, event.trigger.threshold
    if norm is None:
        return 0.0
    if norm != norm:
        return float("inf")
    return norm / threshold if threshold else norm


def _weight(culprit: Culprit) -> float:
    for value in (culprit.share, culprit.grad_norm):
        if value is not None and value == value:
            return abs(value)
    return 0.0


def describe(culprit: Culprit) -> dict[str, Any]:
    """A culprit's record as pairs of label and text, and what stands around it."""
    ratios = culprit.ratios
    facts = [
        ("share of the spike", percent(culprit.share)),
        (
            "gradient norm" if culprit.is_exact else "gradient norm, at least",
            number(culprit.grad_norm),
        ),
        ("advantage", number(culprit.advantage)),
        ("log-prob", number(culprit.log_prob)),
        ("old log-prob, used", number(culprit.old_log_prob_used)),
        ("old log-prob, stored", number(culprit.old_log_prob_stored)),
        ("rollout log-prob", number(culprit.rollout_log_prob)),
        ("reference log-prob", number(culprit.ref_log_prob)),
        ("ratio new / old", number(ratios.current_over_old)),
        ("ratio old / rollout", number(ratios.old_over_rollout)),
        ("ratio of the sequence", number(ratios.sequence_geometric_mean)),
        ("entropy", number(culprit.entropy)),
        ("rollout-correction weight", number(culprit.is_weight)),
        ("d loss / d log-prob", number(culprit.coefficients.log_prob)),
        ("of it the KL term", number(culprit.coefficients.kl)),
        ("d loss / d entropy", number(culprit.coefficients.entropy)),
        ("reward of the sequence", number(culprit.reward)),
    ]
    numbers = [(_spoken(name), number(value)) for name, value in culprit.cause.numbers.items()]
    return {
        "culprit": culprit,
        "token": one_line(culprit.text, 60) or "(no text)",
        "before": visible(culprit.text_before or "")[-300:],
        "marked": visible(culprit.text)[:600],
        "after": visible(culprit.text_after or "")[:300],
        "place": (
            f"rank {number(culprit.rank)}, micro-batch {number(culprit.micro_batch)}, "
            f"row {number(culprit.micro_batch_row)}, position {span(culprit.positions)}"
        ),
        "sequence": one_line(culprit.sequence_id or "–"),
        "source": one_line(culprit.data_source or "–"),
        "share": percent(culprit.share),
        "norm": number(culprit.grad_norm),
        "facts": [fact for fact in facts if fact[1] != "–"],
        "numbers": [pair for pair in numbers if pair[1] != "–"],
    }


def _layer_note(event: Event) -> str | None:
    """Which layers are furthest above their own history, as a sentence."""
    history = event.layer_history
    known = {k: v for k, v in (history.excess if history else {}).items() if v is not None}
    if not known:
        return None
    highest = sorted(known, key=known.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{layer} {number(known[layer], 3)}" for layer in highest)
    return f"Times its own median over {number(history.num_steps)} steps: {listed}."


def _spoken(name: str) -> str:
    """``advantage_over_typical`` as ``advantage / typical``."""
    return name.replace("_over_", " / ").replace("_", " ")


def _causes(culprits: list[dict[str, Any]]) -> list[tuple[advice.Advice, list[dict[str, Any]]]]:
    """Causes in the order of their largest culprit, each with its culprits."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in culprits:
        groups.setdefault(entry["culprit"].cause.label, []).append(entry)
    return [(advice.of(label), members) for label, members in groups.items()]


def culprit_count(event: Event) -> str:
    """``2 tokens``, ``1 sequence``; spans of several kinds are counted as culprits."""
    spans = {culprit.span for culprit in event.culprits}
    return plural(len(event.culprits), spans.pop() if len(spans) == 1 else "culprit")
