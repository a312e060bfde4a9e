# SPDX-License-Identifier: Apache-2.0
"""One event as the page's template wants it, with everything worked out beforehand."""

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ...record import Culprit, Event, PartShare, PathEntry, Search
from ...record.bundle import Sequence
from ...words.advice import replay_line
from ...words.causes import Meaning, meaning_of
from ...words.culprits import by_size, carried, leader, shares_sentence
from ...words.cures import tried
from ...words.faults import LINKS, fault_sentences, step_before
from ...words.hurt import did_it_hurt
from ...words.next_step import next_step
from ...words.numbers import number, percent, with_error
from ...words.story import ACTIONS, CERTIFICATES, cause_of, odd_number, step_cause, tell, verdict_sentences
from ...words.text import one_line, plural, span, spoken, visible
from ..figures import drawings
from ..runs import tokens
from ..runs.run import RunFolder, bundle_folder, read_actor, read_pictures, read_sequences
from ..runs.tokens import shade

CULPRITS = 40
"""Culprits written out per event; the rest are counted."""
_PARTS = 6
"""Of the rows, prompts and data sources each."""
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
    "teacher_gap": "teacher's log-prob",
    "non_finite": "d loss / d log-prob",
}
"""Which fact of a culprit each cause is about."""
ESSENTIAL = ("value", "return", "advantage", "ratio new / old", "log-prob", "entropy", "reward of the sequence")
_AMONG_FACTS = ("value", "value_target", "teacher_log_prob", "coefficient")
"""Numbers of a cause that stand among the facts by another name."""
_REPLAYED = {
    "none": "the step",
    "subtract": "the culprits alone",
    "swap": "the culprits' micro-batches",
    "recompute": "a micro-batch without the culprits",
}
"""What a certificate replayed, by its method."""


class CulpritView:
    """A culprit's numbers in the order of their use."""

    def __init__(self, event: Event, culprit: Culprit):
        self.culprit = culprit
        self.token = one_line(culprit.text, 60) or "(no text)"
        self.before = visible(culprit.text_before or "")[-300:]
        self.marked = visible(culprit.text)[:600]
        self.after = visible(culprit.text_after or "")[:300]
        self.place = (
            f"rank {number(culprit.rank)}, micro-batch {number(culprit.micro_batch)}, "
            f"row {number(culprit.micro_batch_row)}, position {span(culprit.positions)}"
        )
        if culprit.turn:
            self.place += f", turn {culprit.turn.number} of {culprit.turn.num_turns}"
        self.share = carried(event, [culprit]) or number(None)
        self.norm = ("" if culprit.is_exact else "at least ") + number(culprit.grad_norm)
        known = _facts(culprit)
        # The fact that the cause is about comes first, with what is odd about it.
        odd, about = odd_number(culprit), ODD_FACTS.get(culprit.cause.label, "")
        if about not in known and odd:  # a cause about no single fact of the record, such as the Jacobian
            about = _in_words(f"{meaning_of(culprit.cause.label).factor}_over_typical")
        self.essential = [(about, known[about], odd or "the odd one")] if about in known else []
        self.essential += [(name, known[name], "") for name in ESSENTIAL if name in known and name != about]
        named = {label for label, _, _ in self.essential}
        self.rest = [(label, text) for label, text in known.items() if label not in named]

    @property
    def cells(self) -> tuple[str, ...]:
        ratio = number(self.culprit.ratios.current_over_old)
        return self.share, self.norm, number(self.culprit.advantage), ratio, spoken(self.culprit.cause.label)


def _facts(culprit: Culprit) -> dict[str, str]:
    facts = {
        "value": culprit.value,
        "value before the update": culprit.old_value,
        "return": culprit.value_target,
        "advantage": culprit.advantage,
        "log-prob": culprit.log_prob,
        "teacher's log-prob": culprit.teacher_log_prob,
        "old log-prob, used": culprit.old_log_prob_used,
        "old log-prob, stored": culprit.old_log_prob_stored,
        "rollout log-prob": culprit.rollout_log_prob,
        "reference log-prob": culprit.ref_log_prob,
        "ratio new / old": culprit.ratios.current_over_old,
        "ratio old / rollout": culprit.ratios.old_over_rollout,
        "ratio of the sequence": culprit.ratios.sequence_geometric_mean,
        "entropy": culprit.entropy,
        "rollout-correction weight": culprit.is_weight,
        "d loss / d log-prob": culprit.coefficients.log_prob,
        "of it the KL term": culprit.coefficients.kl,
        "d loss / d entropy": culprit.coefficients.entropy,
        "reward of the sequence": culprit.reward,
        "largest token's own norm": max(culprit.token_norms or (), default=None),
    }
    numbers = culprit.cause.numbers.items()
    pairs = [*facts.items(), *((_in_words(name), value) for name, value in numbers if name not in _AMONG_FACTS)]
    known = {label: number(value) for label, value in pairs if value is not None}
    return (
        known if culprit.versions is None else {**known, "sampled by the weights of": _each("step", *culprit.versions)}
    )


def _each(noun: str, first: int, last: int) -> str:
    """``step 3``, ``steps 3 to 5``."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


class EventView:
    """What terminal, Markdown and page show of one event."""

    def __init__(self, event: Event, run: RunFolder):
        root = run.events_root or run.path
        actor, shown = read_actor(root, event), by_size(event.culprits)
        self.event, self.root = event, root
        self.clip = _clip(event, actor)
        self.story = tell(event, self.clip)
        self.next = next_step(event, actor)
        self.tried = tried(event)
        self.hurt = did_it_hurt(event, run.metrics.known)
        self.context = context(event, run.kinds)
        self.verdict = verdict_sentences(event)
        self.title = _title(event)
        self.culprits = [CulpritView(event, culprit) for culprit in shown[:CULPRITS]]
        self.num_hidden_culprits = max(len(shown) - CULPRITS, 0)
        self.causes = _causes(self.culprits)
        self.other = step_cause(event)
        """What made the spike, or a part of it, that is no token's; with its meaning and its numbers as text."""
        self.other_meaning = meaning_of(self.other.label) if self.other else None
        self.other_numbers = [
            (_in_words(name), number(value))
            for name, value in (self.other.numbers.items() if self.other else ())
            if not name.endswith("_over_run")
        ]
        self.over_run = _over_run(event)
        self.again = _again(event)
        self.fault = " ".join(fault_sentences(event))
        self.before = step_before(event, run.events)
        self.link = LINKS.get(event.fault.at, "") if event.fault is not None else ""
        """Which one broke, in words; empty in records from before that was asked."""
        self.shares = shares_sentence(event)
        self.parts = _parts(event)
        """By kind a table's cells: what each row, prompt and data source carries."""
        self.search_cost = cost(event.search)
        self.certificate = CERTIFICATES.get(event.certificate.verdict, event.certificate.verdict)
        self.action = ACTIONS.get(event.action.taken, event.action.taken)
        folder = bundle_folder(root, event)
        is_whole = folder is not None and (folder / "meta.json").is_file()
        self.replay = replay_line(shlex.quote(one_line(str(folder)))) if is_whole else ""
        """The command that replays the event; empty where there is no bundle."""
        self.layer_note = _layer_note(event)
        self.path, self.num_hidden_parts = tree(event.search)


class EventPage(EventView):
    """The same with drawings, and the sequences token by token; ``token_note`` says why there are none."""

    def __init__(self, event: Event, run: RunFolder, budget: int, shown: int):
        """The page can carry ``budget`` tokens of this event, and show ``shown`` of them at first."""
        super().__init__(event, run)
        sequences, self.token_note = read_sequences(self.root, event)
        sequences = [_with_trusted_shares(event, sequence) for sequence in sequences]
        self.shades = shade(sequences)
        count = max(len(sequences), 1)
        self.sequences = [
            tokens.view(sequence, event.culprits, budget // count, max(shown // count, 20)) for sequence in sequences
        ]
        with_culprits = [view.sequence for view in self.sequences if view.culprits]
        pictures, self.picture_note = read_pictures(self.root, event, with_culprits, PICTURE_BYTES)
        self.pictures = {
            name: f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
            for name, content in pictures.items()
        }
        self.siblings = _siblings(event, sequences)
        self.heat, self.is_heat_whole = drawings.heat_map(event)
        self.layers = drawings.layer_bars(event)
        self.sparks = [(part, drawings.spark(part, event.step.global_step)) for part in self.hurt.parts]

    @property
    def default(self) -> str:
        """Name of the measure that shades at first."""
        return self.shades[0].measure.name if self.shades else ""

    def level(self, sequence: int, position: int) -> str:
        """The letter that shades a token at first."""
        return self.shades[0].levels[sequence][position] if self.shades else tokens.NOT_KNOWN


def _title(event: Event) -> str:
    title = f"Step {event.step.global_step}, mini-batch {event.step.mini_batch}"
    if event.step.stage:
        title += f", Lopti's {event.step.stage} stage"
    return title + ", the critic" if event.model == "critic" else title


def _clip(event: Event, actor: Mapping[str, Any]) -> float | None:
    """The norm that gradients were clipped to, as the event says, else its bundle; None where it is not known."""
    if event.consequence is not None:
        return event.consequence.grad_clip
    try:
        clip = float(actor["grad_clip"])
    except (ValueError, KeyError, TypeError):
        return None
    return clip if 0 < clip < float("inf") else None


def _parts(event: Event) -> list[tuple[str, list[tuple[str, ...]]]]:
    found = event.shares
    kinds = () if found is None else (("row", found.rows), ("prompt", found.prompts), ("data source", found.sources))

    def cells(part: PartShare) -> tuple[str, ...]:
        share = with_error(part.share, part.share_error, 3, percent)
        return part.name or "–", share, number(part.num_rows), number(part.num_tokens)

    return [(kind, [cells(part) for part in parts[:_PARTS]]) for kind, parts in kinds if parts]


def _with_trusted_shares(event: Event, sequence: Sequence) -> Sequence:
    """The sequence with the shares that the page shows: none that is not trusted, and a culprit's own as measured."""
    if sequence.share is None:
        return sequence
    if event.shares is not None and not event.shares.is_trusted:
        return replace(sequence, share=None, share_error=None)
    share, error = list(sequence.share), list(sequence.share_error or [0.0] * len(sequence.share))
    for culprit in event.culprits:
        is_here = tokens.is_same(culprit, sequence) and len(culprit.positions) == 1
        if is_here and culprit.positions[0] < min(len(share), len(error)) and culprit.share is not None:
            share[culprit.positions[0]] = culprit.share
            error[culprit.positions[0]] = culprit.share_error or 0.0
    return replace(sequence, share=tuple(share), share_error=tuple(error) if sequence.share_error else None)


def severity(event: Event) -> float:
    """How bad a spike is: its norm over its threshold; one that is not finite is worst."""
    norm, threshold = event.trigger.grad_norm, event.trigger.threshold
    if norm is None:
        return 0.0
    if norm != norm:
        return float("inf")
    return norm / threshold if threshold else norm


def _siblings(event: Event, sequences: list[Sequence]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Prompt by prompt, its rollouts: name, reward, advantage, tokens. The culprit's own comes first."""
    made = []
    for culprit in {culprit.sequence_id: culprit for culprit in event.culprits if culprit.siblings}.values():
        own = next((s for s in sequences if s.sequence_id == culprit.sequence_id), None)
        lines = [(culprit.sequence_id, culprit.reward, culprit.advantage, len(own) if own else None)]
        lines += [(s.sequence_id, s.reward, s.advantage, s.num_tokens) for s in culprit.siblings or ()]
        cells = [((name or "").rpartition(":")[2] or "–", *map(number, numbers)) for name, *numbers in lines]
        # A chat's question is at its end.
        made.append((one_line(culprit.prompt or "a prompt", 80, keep="end"), cells))
    return made


def _over_run(event: Event) -> str:
    known = [f"{name} {number(value, 3)}×" for name, value in (event.batch.over_run or {}).items()]
    return f"Against the run's usual: {', '.join(known)}." if known else ""


def _again(event: Event) -> list[str]:
    """What came of running parts of the step again; sentences."""
    sentences, rerun, difference = [], event.rerun, event.certificate.replay_difference
    if rerun is not None:
        outcome = "it came back" if rerun.is_reproduced else "it did not come back"
        apart = f" ({percent(rerun.difference)} of the spike apart)" if rerun.difference is not None else ""
        sentences.append(f"The step's micro-batches run again gave a norm of {number(rerun.norm)}{apart}: {outcome}.")
    if difference is not None:
        apart = f"{number(difference, 2)} apart" if difference else "bit for bit alike"
        sentences.append(f"Two replays of {_REPLAYED[event.certificate.method]} were {apart}.")
    if event.head_grad_norm is not None:
        sentences.append(f"The output head's part of the gradient has norm {number(event.head_grad_norm)}.")
    return sentences


def _layer_note(event: Event) -> str | None:
    """Which layers are furthest above their own history, as a sentence."""
    history = event.layer_history
    known = {k: v for k, v in (history.excess if history else {}).items() if v is not None}
    if not known:
        return None
    highest = sorted(known, key=known.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{layer} {number(known[layer], 3)}×" for layer in highest)
    return f"Against its own median over {number(history.num_steps)} steps: {listed}."


def _in_words(name: str) -> str:
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


def context(event: Event, kinds: list[tuple[int, str, str]]) -> list[tuple[str, str]]:
    """An event's numbers by name; its run's ``kinds`` count the others like it."""
    run, first = event.run, leader(event.culprits)
    made_by = (run.trainer, run.torch and f"torch {run.torch}", run.gradloc and f"gradloc {run.gradloc}")
    row = "" if first is None or first.data_row is None else f"row {first.data_row}"
    known = {
        "when": _when(event.time),
        "made by": ", ".join(filter(None, made_by)),
        "model": run.model and one_line(run.model, 90, keep="end"),
        "commit": run.commit,
        "config": run.config,
        "data": ", ".join(filter(None, (first and first.data_source, row))),
        "sampled": first and first.versions and _sampled(first.versions, event.step.global_step),
        "seen": _seen(event, kinds),
    }
    return [(name, one_line(value)) for name, value in known.items() if value]


def _sampled(versions: tuple[int, int], step: int | None) -> str:
    """By which weights, and by how many updates they lag: step n's own rollout has those of step n - 1."""
    behind = 0 if step is None else max(step - 1 - versions[1], 0)
    return f"by the weights of {_each('step', *versions)}" + (f", {plural(behind, 'update')} behind" if behind else "")


def _when(time: str | None) -> str | None:
    try:
        at = datetime.fromisoformat((time or "").replace("Z", "+00:00"))
        return f"{at.day} {at:%b %Y, %H:%M} UTC"
    except ValueError:
        return time


def _seen(event: Event, kinds: list[tuple[int, str, str]]) -> str:
    """How often this token with this cause, and how often this cause."""
    cause, text = cause_of(event), (leader(event.culprits) or Culprit()).text
    alike = [step for step, *kind in kinds if kind == [cause, text]]
    same = sum(other == cause for _, other, _ in kinds)
    of = f"{spoken(cause) if cause else 'no cause'}: {same} of {plural(len(kinds), 'event')}"
    if len(alike) < 2:
        return f"once, at step {event.step.global_step}" + (f"; {of}" if len(kinds) > 1 else "")
    again = "this token" if event.culprits else "the same"
    return f"{again} {len(alike)} times, first at step {min(alike)}, last at step {max(alike)}; {of}"


LIMIT = 160
"""Parts drawn per event; the rest are counted."""
STAGES = {
    "share": "shares of all tokens",
    "coefficients": "loss coefficients",
    "verify": "candidate, measured alone",
    "residual": "what is left without the culprits",
    "sketch": "norms by random directions",
    "bisect": "bisection",
}
"""What the phases measure that are about no part of the batch."""


@dataclass
class Node:
    """One measured part and the parts it was cut into."""

    probe: PathEntry
    children: list["Node"] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the part's norm is over its own threshold; a non-finite norm is."""
        norm, threshold = self.probe.norm, self.probe.threshold
        return norm is not None and threshold is not None and not norm <= threshold

    @property
    def label(self) -> str:
        probe = self.probe
        if probe.phase in STAGES:
            return STAGES[probe.phase]
        if probe.phase == "rank" and probe.ranks:
            return _each("rank", probe.ranks[0], probe.ranks[-1] - 1)
        if probe.tokens and probe.phase != "micro_batch":
            return _each("token", probe.tokens[0], probe.tokens[-1] - 1)
        if probe.phase in ("micro_batch", "") and probe.micro_batch is not None:
            return f"micro-batch {probe.micro_batch}"
        return probe.phase


def tree(search: Search) -> tuple[list[Node], int]:
    """The roots of the search's tree in the order measured, and how many parts were left out.

    A part belongs under the smallest part measured before it that holds it.
    """
    roots: list[Node] = []
    nodes: list[Node] = []
    for probe in search.path[:LIMIT]:
        node = Node(probe)
        around = [other for other in nodes if _holds(other.probe, probe)]
        siblings = min(around, key=lambda other: _size(other.probe)).children if around else roots
        siblings.append(node)
        nodes.append(node)
    return roots, max(len(search.path) - LIMIT, 0)


def _holds(outer: PathEntry, inner: PathEntry) -> bool:
    if outer.phase in STAGES or inner.phase in STAGES or outer.micro_batch != inner.micro_batch:
        return False
    if _size(outer) <= _size(inner) or (outer.ranks and inner.ranks and not _is_within(inner.ranks, outer.ranks)):
        return False
    return outer.tokens is None or (inner.tokens is not None and _is_within(inner.tokens, outer.tokens))


def _is_within(inner: list[int], outer: list[int]) -> bool:
    return outer[0] <= inner[0] and inner[-1] <= outer[-1]


def _size(probe: PathEntry) -> tuple[int, ...]:
    """Ranks and tokens of a part, all where they are not named."""
    return tuple(bounds[-1] - bounds[0] if bounds else 1 << 30 for bounds in (probe.ranks, probe.tokens))


def cost(search: Search) -> str:
    passes = (search.backwards, "backward pass"), (search.forwards, "forward pass")
    parts = [plural(count, kind) for count, kind in passes if count is not None]
    return ", ".join(parts + ([] if search.seconds is None else [f"{number(search.seconds, 3)} s"]))
