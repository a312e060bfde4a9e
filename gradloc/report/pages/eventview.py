# SPDX-License-Identifier: Apache-2.0
"""One event as the page's template wants it, with everything worked out beforehand."""

import base64
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...record import Culprit, Event, Sequence, StepCause
from ...words.advice import replay_lines
from ...words.culprits import by_size, carried, shares_sentence
from ...words.hurt import Hurt, Part, did_it_hurt
from ...words.meanings import Meaning, meaning_of
from ...words.next_step import NextStep, next_step
from ...words.numbers import number, percent
from ...words.story import ACTIONS, CERTIFICATES, ODD, Story, odd_number, step_cause, tell
from ...words.text import one_line, plural, span, visible
from ...words.verdict import verdict_sentences
from ..figures import drawings
from ..runs import searchpath, tokens
from ..runs.events import bundle_folder, read_actor, read_pictures, read_sequences
from ..runs.run import RunFolder
from ..runs.shading import Shades, shade
from .context import context

CULPRITS = 40
"""Culprits written out per event; the rest are counted."""

PICTURE_BYTES = 3_000_000
"""Of the pictures of one event in a page."""

ODD_FACTS = {
    "token_mismatch": "ratio new / old",
    "sequence_mismatch": "ratio of the sequence",
    "extreme_advantage": "advantage",
    "low_probability": "log-prob",
    "kl_term": "of it the KL term",
    "is_weight": "rollout-correction weight",
    "entropy_term": "d loss / d entropy",
    "value_outlier": "return",
    "non_finite": "d loss / d log-prob",
}
"""Which fact of a culprit each cause is about."""
ESSENTIAL = ("value", "return", "advantage", "ratio new / old", "log-prob", "entropy", "reward of the sequence")


_SAID = ("value", "value_target", "coefficient")
"""Numbers of a cause that stand among the facts by another name."""
_REPLAYED = {
    "none": "the step",
    "subtract": "the culprits alone",
    "swap": "the culprits' micro-batches",
    "recompute": "a micro-batch without the culprits",
}
"""What a certificate's replay difference is of, by its method."""


@dataclass
class CulpritView:
    """A culprit's numbers in the order of their use."""

    culprit: Culprit
    token: str
    before: str
    marked: str
    after: str
    place: str
    share: str
    norm: str
    essential: list[tuple[str, str, str]]
    """Label, value, and what is odd about it (or nothing); the odd one comes first."""
    rest: list[tuple[str, str]]


@dataclass
class EventView:
    """What the template shows of one event."""

    event: Event
    story: Story
    clip: float | None
    """The norm that gradients were clipped to, where it is known."""
    next: NextStep | None
    hurt: Hurt
    context: list[tuple[str, str]]
    verdict: str
    title: str
    culprits: list[CulpritView]
    num_hidden_culprits: int
    causes: list[tuple[Meaning, list[CulpritView]]]
    other: tuple[Meaning, StepCause, list[tuple[str, str]]] | None
    """What made it, or a part of it, that is no token's: what it means, the record, its numbers as text."""
    over_run: str
    """The batch beside the run's earlier ones; a sentence, or nothing."""
    again: list[str]
    """What came of running parts of the step again; sentences."""
    shares: str
    """What the shares add up to; a sentence, or nothing."""
    search_cost: str
    certificate: str
    action: str
    replay: dict[str, str]
    """The command that replays it, by the verl that it is for; empty where there is no bundle."""
    layer_note: str | None
    path: list[searchpath.Node]
    num_hidden_parts: int
    sequences: list[tokens.TokenView] = field(default_factory=list)
    siblings: list[tuple[str, list[tuple[str, ...]]]] = field(default_factory=list)
    """Prompt by prompt, its rollouts: name, reward, advantage, tokens. The culprit's comes first."""
    shades: list[Shades] = field(default_factory=list)
    token_note: str | None = None
    pictures: dict[str, str] = field(default_factory=dict)
    """By file name, as data URLs; of the sequences that hold culprits."""
    picture_note: str | None = None
    heat: str | None = None
    is_heat_whole: bool = True
    layers: str | None = None
    sparks: list[tuple[Part, str]] = field(default_factory=list)
    """What the metrics did around the event, and drawings of it."""

    @property
    def default(self) -> str:
        """Name of the measure that shades at first."""
        return self.shades[0].measure.name if self.shades else ""


def plain_view(event: Event, run: RunFolder) -> EventView:
    """The event without drawings and token arrays.

    Args:
        event: the event.
        run: its run, as the user named it: the replay command is relative to that.
    """
    root = run.events_root or run.path
    actor = read_actor(root, event)
    clip = clip_of(event, actor)
    shown = by_size(event.culprits)
    written = [describe(event, culprit) for culprit in shown[:CULPRITS]]
    path, num_hidden = searchpath.tree(event.search)
    folder = bundle_folder(root, event)
    return EventView(
        event=event,
        story=tell(event, clip),
        clip=clip,
        next=next_step(event, actor),
        hurt=did_it_hurt(event, run.metrics.known),
        context=context(event, run.events),
        verdict=verdict_sentences(event),
        title=f"Step {event.step.global_step}, mini-batch {event.step.mini_batch}"
        + (f", Lopti's {event.step.stage} stage" if event.step.stage else "")
        + (", the critic" if event.model == "critic" else ""),
        culprits=written,
        num_hidden_culprits=max(len(shown) - CULPRITS, 0),
        causes=_causes(written),
        other=_other(event),
        over_run=_over_run(event),
        again=_again(event),
        shares=shares_sentence(event),
        search_cost=searchpath.cost(event.search),
        certificate=CERTIFICATES.get(event.certificate.verdict, event.certificate.verdict),
        action=ACTIONS.get(event.action.taken, event.action.taken),
        replay=_replay(event, folder),
        layer_note=_layer_note(event),
        path=path,
        num_hidden_parts=num_hidden,
    )


def full_view(event: Event, run: RunFolder, budget: int, shown: int) -> tuple[EventView, str | None]:
    """The event with drawings and its sequences token by token.

    Args:
        event: the event.
        run: its run.
        budget: tokens that the page can carry of this event.
        shown: tokens that it can show at first.

    Returns:
        The view, and a sentence when the sequences could not be read.
    """
    made, root = plain_view(event, run), run.events_root or run.path
    sequences, note = read_sequences(root, event)
    made.token_note = note
    sequences = [_told(event, sequence) for sequence in sequences]
    made.shades = shade(sequences)
    count = max(len(sequences), 1)
    made.sequences = [
        tokens.view(sequence, event.culprits, budget // count, max(shown // count, 20)) for sequence in sequences
    ]
    with_culprits = [entry.sequence for entry in made.sequences if entry.culprits]
    pictures, made.picture_note = read_pictures(root, event, with_culprits, PICTURE_BYTES)
    encoded = {name: base64.b64encode(content).decode("ascii") for name, content in pictures.items()}
    made.pictures = {name: f"data:image/png;base64,{content}" for name, content in encoded.items()}
    made.siblings = _siblings(event.culprits, sequences)
    heat = drawings.heat_map(event)
    if heat is not None:
        made.heat, made.is_heat_whole = heat
    made.layers = drawings.layer_bars(event)
    made.sparks = [(part, drawings.spark(part, event.step.global_step)) for part in made.hurt.parts]
    return made, note


def clip_of(event: Event, actor: Mapping[str, Any]) -> float | None:
    """The norm that gradients were clipped to, as the event says, else its bundle; None where it is not known."""
    if event.consequence is not None:
        return event.consequence.grad_clip
    try:
        clip = float(actor["grad_clip"])
    except (ValueError, KeyError, TypeError):
        return None
    return clip if 0 < clip < float("inf") else None


def _replay(event: Event, folder: Path | None) -> dict[str, str]:
    if folder is None or not folder.is_dir() or event.model:  # a replay rebuilds the actor alone
        return {}
    return replay_lines(shlex.quote(one_line(str(folder))), event.run.trainer)


def _told(event: Event, sequence: Sequence) -> Sequence:
    """The sequence with the shares as they are told elsewhere: none that is not trusted, a culprit's as measured."""
    if sequence.share is None:
        return sequence
    if event.shares is not None and not event.shares.is_trusted:
        return replace(sequence, share=None, share_error=None)
    share, error = list(sequence.share), list(sequence.share_error or [0.0] * len(sequence.share))
    for culprit in event.culprits:
        [*rest] = culprit.positions
        if tokens.is_same(culprit, sequence) and len(rest) == 1 and rest[0] < len(share) and culprit.share is not None:
            share[rest[0]], error[rest[0]] = culprit.share, culprit.share_error or 0.0
    return replace(sequence, share=tuple(share), share_error=tuple(error) if sequence.share_error else None)


def severity(event: Event) -> float:
    """How bad a spike is: its norm over its threshold; one that is not finite is worst."""
    norm, threshold = event.trigger.grad_norm, event.trigger.threshold
    if norm is None:
        return 0.0
    if norm != norm:
        return float("inf")
    return norm / threshold if threshold else norm


def describe(event: Event, culprit: Culprit) -> CulpritView:
    """A culprit's record as pairs of label and text, and what stands around it."""
    ratios = culprit.ratios
    facts = [
        ("value", number(culprit.value)),
        ("value before the update", number(culprit.old_value)),
        ("return", number(culprit.value_target)),
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
        ("largest token's own norm", number(max(culprit.token_norms or (), default=None))),
        *((_spoken(name), number(value)) for name, value in culprit.cause.numbers.items() if name not in _SAID),
    ]
    known = {label: text for label, text in facts if text != "–"}
    essential = _essential(culprit, known)
    named = {label for label, _, _ in essential}
    return CulpritView(
        culprit=culprit,
        token=one_line(culprit.text, 60) or "(no text)",
        before=visible(culprit.text_before or "")[-300:],
        marked=visible(culprit.text)[:600],
        after=visible(culprit.text_after or "")[:300],
        place=(
            f"rank {number(culprit.rank)}, micro-batch {number(culprit.micro_batch)}, "
            f"row {number(culprit.micro_batch_row)}, position {span(culprit.positions)}"
            + (f", turn {culprit.turn.number} of {culprit.turn.num_turns}" if culprit.turn else "")
        ),
        share=carried(event, [culprit]) or number(None),
        norm=("" if culprit.is_exact else "at least ") + number(culprit.grad_norm),
        essential=essential,
        rest=[(label, text) for label, text in known.items() if label not in named],
    )


def _essential(culprit: Culprit, known: dict[str, str]) -> list[tuple[str, str, str]]:
    """The fact that the cause is about, marked, and the few that everybody looks at."""
    label, odd = culprit.cause.label, odd_number(culprit)
    about = ODD_FACTS.get(label, "")
    if about not in known and odd:  # a cause about no single fact of the record, such as the Jacobian
        about = _spoken(ODD[label][0])
    first = [(about, known[about], odd or "the odd one")] if about in known else []
    return first + [(name, known[name], "") for name in ESSENTIAL if name in known and name != about]


def _siblings(culprits: Iterable[Culprit], sequences: list[Sequence]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The rollouts of each culprit's prompt, its own first."""
    made = []
    for culprit in {culprit.sequence_id: culprit for culprit in culprits if culprit.siblings}.values():
        own = next((s for s in sequences if s.sequence_id == culprit.sequence_id), None)
        lines = [(culprit.sequence_id, culprit.reward, culprit.advantage, len(own) if own else None)]
        lines += [(s.sequence_id, s.reward, s.advantage, s.num_tokens) for s in culprit.siblings or ()]
        written = [(_index(name), number(reward), number(odd), number(size)) for name, reward, odd, size in lines]
        # A chat's question is at its end.
        made.append((one_line(culprit.prompt or "a prompt", 80, keep="end"), written))
    return made


def _index(name: str | None) -> str:
    """A rollout's number among those of its prompt."""
    return (name or "").rpartition(":")[2] or "–"


def _other(event: Event) -> tuple[Meaning, StepCause, list[tuple[str, str]]] | None:
    cause = step_cause(event)
    if cause is None:
        return None
    known = [(_spoken(name), number(value)) for name, value in cause.numbers.items() if not name.endswith("_over_run")]
    return meaning_of(cause.label), cause, known


def _over_run(event: Event) -> str:
    known = [f"{name} {number(value, 3)}×" for name, value in (event.batch.over_run or {}).items()]
    return f"Against the run's usual: {', '.join(known)}." if known else ""


def _again(event: Event) -> list[str]:
    said, rerun, difference = [], event.rerun, event.certificate.replay_difference
    if rerun is not None:
        came = "it came back" if rerun.is_reproduced else "it did not come back"
        apart = f" ({percent(rerun.difference)} of the spike apart)" if rerun.difference is not None else ""
        said.append(f"The step's micro-batches run again gave a norm of {number(rerun.norm)}{apart}: {came}.")
    if difference is not None:
        apart = f"{number(difference, 2)} apart" if difference else "bit for bit alike"
        said.append(f"Two replays of {_REPLAYED[event.certificate.method]} were {apart}.")
    if event.head_grad_norm is not None:
        said.append(f"The output head's part of the gradient has norm {number(event.head_grad_norm)}.")
    return said


def _layer_note(event: Event) -> str | None:
    """Which layers are furthest above their own history, as a sentence."""
    history = event.layer_history
    known = {k: v for k, v in (history.excess if history else {}).items() if v is not None}
    if not known:
        return None
    highest = sorted(known, key=known.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{layer} {number(known[layer], 3)}×" for layer in highest)
    return f"Against its own median over {number(history.num_steps)} steps: {listed}."


def _spoken(name: str) -> str:
    """``advantage_over_typical`` as ``advantage / typical``."""
    return name.replace("_over_", " / ").replace("_", " ")


def _causes(culprits: list[CulpritView]) -> list[tuple[Meaning, list[CulpritView]]]:
    """Causes in the order of their largest culprit, each with its culprits."""
    groups: dict[str, list[CulpritView]] = {}
    for entry in culprits:
        groups.setdefault(entry.culprit.cause.label, []).append(entry)
    return [(meaning_of(label), members) for label, members in groups.items()]


def culprit_count(event: Event) -> str:
    """``2 tokens``, ``1 sequence``; spans of several kinds are counted as culprits."""
    spans = {culprit.span for culprit in event.culprits}
    return plural(len(event.culprits), spans.pop() if len(spans) == 1 else "culprit")
