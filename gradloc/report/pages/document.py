# SPDX-License-Identifier: Apache-2.0
"""Build an event's document as data; the page, the terminal and Markdown lay it out."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ...explain import story
from ...explain.advice import LOOP, replay_line
from ...explain.aftermath import impact_of
from ...explain.causes import CauseInfo, cause_info
from ...explain.culprits import carried, shares_sentence
from ...explain.cures import failed_cures
from ...explain.faults import LINKS, fault_sentences, step_before
from ...explain.numbers import bounded, number, percent, with_error
from ...explain.text import numbered, one_line, plural, span, spoken
from ...record import Culprit, Event, PartShare, PathEntry, Search
from ...record.bundle import Sequence as TokenSequence
from ...record.columns import COLUMNS, OF_A_TOKEN
from ..logs.recording import Metrics
from ..runs.events import bundle_folder, read_actor
from ..runs.overview import HEAD, overview
from ..runs.run import RunFolder

_MAX_IN_TABLE = 40
"""Culprits in the table at most; the others are counted."""
_MAX_DETAILED = 4
"""Culprits of one cause that are shown with all of their numbers, at most."""
_UNUSUAL = 1.5
"""A statistic of the batch is shown when it is this many times the run's, or less than one over it."""
_MAX_PARTS = 6
"""Rows, prompts and data sources whose shares are shown, at most of each."""
_TABLE_COLUMNS = ("advantage", "ratio")
"""Columns of :data:`COLUMNS` that the table of culprits has."""
_REPLAYED = {
    "none": "the step",
    "subtract": "the culprits alone",
    "swap": "the culprits' micro-batches",
    "recompute": "a micro-batch without the culprits",
}
"""What was replayed for the certificate's error, by its method."""


class TokenCell(NamedTuple):
    """A cell with a culprit's text, and its token ids for a report without text."""

    text: str
    ids: tuple[int, ...]


class Heading(NamedTuple):
    """A heading of the next blocks."""

    text: str


class Table(NamedTuple):
    """Rows of cells."""

    head: tuple[str, ...]
    rows: list[tuple[str | TokenCell, ...]]


def course_table(metrics: Metrics) -> Table:
    """Make the table of what a run's main metrics did, without their courses."""
    return Table(HEAD[:-1], [course.numbers for course in overview(metrics)])


class Facts(NamedTuple):
    """Triples of name, number, and a remark where the number is odd."""

    pairs: list[tuple[str, str, str]]


class Lines(NamedTuple):
    """Lines to copy, by their purpose."""

    lines: dict[str, str]


class Fold(NamedTuple):
    """Blocks under a summary that can be opened; of a closed one the terminal shows the summary alone."""

    summary: str
    blocks: "list[Block]"
    is_open: bool = False
    token: TokenCell | None = None


Block = str | Heading | Table | Facts | Lines | Fold
"""A part of a section; text is a paragraph."""


class Section(NamedTuple):
    """Blocks under a title. A section without blocks is left out."""

    name: str
    title: str
    blocks: list[Block]


class EventDocument(NamedTuple):
    """The content of an event's page, in reading order."""

    event: Event
    title: str
    """The step, and what part of it."""
    verdict: str
    headline: str
    lede: str
    quote: tuple[str, str, str] | None
    """Text before the largest culprit, its own, and the text after it."""
    named: str
    """The parameters or tensors that made the spike, in a sentence, where no token did."""
    figures: list[tuple[str, str, str]]
    """Triples of value, caption and remark."""
    sections: list[Section]

    def section(self, name: str) -> Section:
        """Return a section by its name; one without blocks where there is none."""
        return next((section for section in self.sections if section.name == name), Section(name, "", []))


def document(event: Event, run: RunFolder) -> EventDocument:
    """Make an event's document from its record and its run's folder."""
    root, shown = run.events_root or run.path, event.by_size[:_MAX_IN_TABLE]
    hurt, followed = impact_of(event, run.metrics.known), story.what_followed(event, _clip(read_actor(root, event)))
    sections = [
        Section("hurt", f"Did it hurt? {hurt.answer.capitalize()}", [hurt.why, *followed]),
        _what_to_do(event, run),
        Section("context", "Which run", [Facts([(name, value, "") for name, value in context(event, run)])]),
        _culprits(event, shown),
        _why(event, shown),
        _where(event),
        _proof(event, run, root),
    ]
    filled, verdict = [section for section in sections if section.blocks], spoken(story.shown_verdict(event))
    says = story.headline(event), story.lede(event), story.quote_of(event), story.named(event), story.figures(event)
    return EventDocument(event, _title(event), verdict, *says, filled)


def _title(event: Event) -> str:
    title = f"Step {event.step.global_step}"
    if event.step.num_mini_batches != 1:
        title += f", mini-batch {event.step.mini_batch}"
    if event.step.stage:
        title += f", Lopti's {event.step.stage} stage"
    return title + ", the critic" if event.model == "critic" else title


def _clip(actor: Mapping[str, Any]) -> float | None:
    """Return the norm that gradients are clipped to by the run's settings; None if unknown."""
    try:
        clip = float(actor["grad_clip"])
    except (ValueError, KeyError, TypeError):
        return None
    return clip if 0 < clip < float("inf") else None


# ---- the first screen


def _what_to_do(event: Event, run: RunFolder) -> Section:
    do, others = run.next_step(event), failed_cures(event)
    blocks: list[Block] = []
    if do is not None:
        grounds = [("Why", do.why, ""), ("Fixed when", do.check, "")]
        blocks = [do.do, Lines(do.lines), Facts([fact for fact in grounds if fact[1]])]
        blocks += [Lines(do.meanwhile)] if do.meanwhile else []
    if others:
        blocks.append(Fold(f"{plural(len(others), 'setting')} tried that would not have helped", [*others]))
    return Section("todo", "What to do now", blocks)


def context(event: Event, run: RunFolder) -> list[tuple[str, str]]:
    """Return pairs of name and value that say where an event comes from, and how often its run had similar ones."""
    made, first = event.run, event.leader
    made_by = (made.trainer, made.torch and f"torch {made.torch}", made.gradloc and f"gradloc {made.gradloc}")
    row = "" if first is None or first.data_row is None else f"row {first.data_row}"
    known = {
        "when": _when(event.time),
        "made by": ", ".join(filter(None, made_by)),
        "model": made.model and one_line(made.model, 90, keep="end"),
        "commit": made.commit,
        "config": made.config,
        "data": ", ".join(filter(None, (first and first.data_source, row))),
        "sampled": first and first.versions and _sampled(first.versions, event.step.global_step),
        "seen": run.seen(event),
    }
    return [(name, one_line(value)) for name, value in known.items() if value]


def _sampled(versions: tuple[int, int], step: int | None) -> str:
    """Say which weights sampled the culprit, and how far behind they were: step n is sampled by step n - 1's."""
    behind = 0 if step is None else max(step - 1 - versions[1], 0)
    late = f", {plural(behind, 'update')} behind" if behind else ""
    return f"by the weights of {numbered('step', *versions)}{late}"


def _when(time: str | None) -> str | None:
    try:
        at = datetime.fromisoformat((time or "").replace("Z", "+00:00"))
        return f"{at.day} {at:%b %Y, %H:%M} UTC"
    except ValueError:
        return time


# ---- the culprits, and why


def _culprits(event: Event, shown: Sequence[Culprit]) -> Section:
    if not shown:
        return Section("tokens", "The tokens", [])
    columns = [name for name in _TABLE_COLUMNS if any(culprit.at(name) is not None for culprit in shown)]
    head = ("token", "where", "share", "norm", *(COLUMNS[name].label for name in columns), "cause")
    rows = []
    for culprit in shown:
        numbers = (number(culprit.at(name)) for name in columns)
        place, share, norm = _place(event, culprit), _share(event, culprit), _norm(culprit)
        rows.append((_token(culprit), place, share, norm, *numbers, spoken(culprit.cause.label)))
    blocks: list[Block] = [Table(head, rows)]
    hidden = len(event.culprits) - len(shown)
    if hidden:
        blocks.append(f"And {plural(hidden, 'culprit')} more in events.jsonl.")
    return Section("tokens", "The tokens", blocks)


def _token(culprit: Culprit) -> TokenCell:
    text = f"row {culprit.micro_batch_row}" if culprit.token_ids == () else one_line(culprit.text, 60) or "(no text)"
    return TokenCell(text, culprit.token_ids or ())


def place_in_batch(event: Event, part: Culprit | TokenSequence) -> str:
    """Say in which row a culprit or a sequence is, with its rank and micro-batch if there are several."""
    words = [f"row {number(part.micro_batch_row)}"]
    if event.step.num_micro_batches != 1:
        words.insert(0, f"micro-batch {number(part.micro_batch)}")
    if event.step.dp_size != 1:
        words.insert(0, f"rank {number(part.rank)}")
    return ", ".join(words)


def _place(event: Event, culprit: Culprit) -> str:
    place = f"{place_in_batch(event, culprit)}, position {span(culprit.positions)}"
    return place + (f", turn {culprit.turn.number} of {culprit.turn.num_turns}" if culprit.turn else "")


def _share(event: Event, culprit: Culprit) -> str:
    return carried(event, [culprit]) or number(None)


def _norm(culprit: Culprit) -> str:
    return ("" if culprit.is_exact else "at least ") + number(culprit.grad_norm)


def _why(event: Event, shown: Sequence[Culprit]) -> Section:
    blocks = _why_step(event)
    by_cause: dict[str, list[Culprit]] = {}
    for culprit in shown:
        by_cause.setdefault(culprit.cause.label, []).append(culprit)
    for label, members in by_cause.items():
        meaning = cause_info(label)
        is_of_batch = "batch_advantage" in members[0].cause.numbers
        blocks += [Heading(meaning.title), meaning.means_of_batch if is_of_batch else meaning.means]
        for index, culprit in enumerate(members[:_MAX_DETAILED]):
            first, rest = _numbers(event, culprit)
            more = [Fold(plural(len(rest), "more number"), [Facts(rest)])] if rest else []
            blocks.append(Fold(_place(event, culprit), [Facts(first), *more], index == 0, _token(culprit)))
        if len(members) > _MAX_DETAILED:
            blocks.append(f"And {plural(len(members) - _MAX_DETAILED, 'culprit')} more with this cause.")
        blocks += _advice(event, meaning)
    if not blocks:
        blocks.append("No token was named, so there is no cause to give.")
    ratios = (event.batch.over_run or {}).items()
    unusual = [f"{spoken(name)} {number(ratio, 3)}×" for name, ratio in ratios if not 1 / _UNUSUAL <= ratio <= _UNUSUAL]
    if unusual:
        blocks.append(f"Against the run's usual: {', '.join(unusual)}.")
    return Section("why", "Why", blocks)


def _why_step(event: Event) -> list[Block]:
    """Return the facts of a cause that is not a token; none without such a cause."""
    cause = story.step_cause(event)
    if cause is None:
        return []
    meaning = cause_info(cause.label)
    blocks: list[Block] = [Heading(meaning.title), meaning.means]
    if cause.names:
        blocks.append(f"{', '.join(one_line(name, 200) for name in cause.names)}.")
    if cause.places:
        places = (f"row {row}, position {at}" if row is not None else f"position {at}" for row, at in cause.places)
        blocks.append(f"At {'; '.join(places)}.")
    own = {name: value for name, value in cause.numbers.items() if not name.endswith("_over_run")}
    if own:
        blocks.append(Facts([(_in_words(name), number(value), "") for name, value in own.items()]))
    return blocks + _advice(event, meaning)


def _advice(event: Event, meaning: CauseInfo) -> list[Block]:
    found = meaning.advice(event.run.trainer, event.search.strategy, event.is_distilled)
    return [Fold("What people do about it", [Lines(dict(found))])] if found else []


def _numbers(event: Event, culprit: Culprit) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return a culprit's known numbers as two lists, the essential ones and the others.

    The number that the culprit's cause is about comes first, with a remark.
    """
    facts = {name: (column.label, culprit.at(name)) for name, column in OF_A_TOKEN.items()} | {
        "sequence_ratio": ("ratio of the sequence", culprit.sequence_ratio),
        "reward": ("reward of the sequence", culprit.reward),
        "token_norm": ("largest token's own norm", max(culprit.token_norms or (), default=None)),
    }
    facts |= {name: (_in_words(name), value) for name, value in culprit.cause.numbers.items() if name not in COLUMNS}
    known = {name: (label, number(value), "") for name, (label, value) in facts.items() if value is not None}
    if culprit.versions is not None:
        known["versions"] = ("sampled by the weights of", numbered("step", *culprit.versions), "")
    meaning, odd = cause_info(culprit.cause.label), story.odd_number(culprit)
    about, remark = meaning.column, odd or "the odd one"
    if about not in known and odd:  # a cause about no single number of a token, such as the Jacobian
        about, remark = f"{meaning.factor}_over_typical", "times the typical size"
        known[about] = (spoken(meaning.factor), *known[about][1:])
    first = [name for name, column in OF_A_TOKEN.items() if column.is_essential] + ["reward"]
    essential = [(*known.pop(about)[:2], remark)] if about in known else []
    essential += [known.pop(name) for name in first if name in known]
    span_numbers = [("share of the spike", _share(event, culprit), ""), ("gradient norm", _norm(culprit), "")]
    return span_numbers + essential, [*known.values()]


def _in_words(name: str) -> str:
    """Write ``advantage_over_typical`` as ``advantage / typical``."""
    return name.replace("_over_", " / ").replace("_", " ")


# ---- where it is, and what proves it


def _where(event: Event) -> Section:
    shares, search = shares_sentence(event), event.search
    blocks: list[Block] = [shares] if shares else []
    found = event.shares
    kinds = () if found is None else (("row", found.rows), ("prompt", found.prompts), ("data source", found.sources))
    blocks += [
        Table((kind, "share of the spike", "rows", "tokens"), [_part(part) for part in parts[:_MAX_PARTS]])
        for kind, parts in kinds
        if parts
    ]
    highest = event.layer_history.excess if event.layer_history else {}
    if highest:
        listed = Counter(highest).most_common(3)
        names = ", ".join(f'"{one_line(layer, 40)}" {number(excess, 3)}×' for layer, excess in listed)
        steps = number(event.layer_history.num_steps if event.layer_history else None)
        blocks.append(f"Gradient norms of layers, each against its own median over {steps} steps: {names}.")
    parts = filter(None, (search.strategy, cost(search)))
    status, is_said = search.status.replace("_", " "), event.certificate.verdict == "explained"
    status += f"; {search.stop_reason}" if search.stop_reason and not is_said else ""
    blocks.append(f"Search: {', '.join(parts)}. Outcome: {status}.")
    if search.path:
        hidden = len(search.path) - _MAX_PROBES
        rest: list[Block] = [f"And {plural(hidden, 'part')} more."] if hidden > 0 else []
        path = Table(("part", "norm", "threshold", "outcome"), [_probe(probe) for probe in search.path[:_MAX_PROBES]])
        blocks.append(Fold("The search's path, with each part's norm and threshold", [path, *rest]))
    return Section("where", "Where it is", blocks)


def _part(part: PartShare) -> tuple[str, ...]:
    share = with_error(part.share, part.share_error, 3, percent)
    return one_line(part.name or "–", 40), share, number(part.num_rows), number(part.num_tokens)


def cost(search: Search) -> str:
    """Write the passes and seconds of a search."""
    passes = (search.backwards, "backward pass"), (search.forwards, "forward pass")
    parts = [plural(count, kind) for count, kind in passes if count is not None]
    return ", ".join(parts + ([] if search.seconds is None else [f"{number(search.seconds, 3)} s"]))


def _proof(event: Event, run: RunFolder, root: Any) -> Section:
    certificate, action, verdict = event.certificate, event.action, story.shown_verdict(event)
    doubt = f" ({certificate.reason})" if certificate.reason and verdict not in ("explained", "not_the_data") else ""
    norm = number(event.trigger.grad_norm if event.trigger.grad_norm is not None else certificate.norm_before, 3)
    norms = f"Norm {norm} with all"
    if event.culprits:
        without = "".join(bounded(certificate.norm_after, certificate.error_bound, 3))
        norms = f"Norm {norm} with {story.pronoun(event)}, {without} without"
    norms += f", threshold {number(certificate.threshold, 3)}"
    blocks: list[Block] = [f"Certificate: {story.CERTIFICATES.get(verdict, verdict)}{doubt}. {norms}."]
    if event.fault is not None and event.fault.at in LINKS:
        there = (place for place, row in enumerate(run.events.rows) if row.step == event.fault.step)
        before = step_before(event, [run.events[place] for place in there])
        link = f"Which link broke: {LINKS[event.fault.at]}."
        blocks.append(" ".join([link, *fault_sentences(event), before]).strip())
    blocks += _replays(event)
    is_said = action.reason == "the step goes on as it is"  # older events give it as the reason to observe
    reason = f" ({action.reason})" if action.reason and not is_said else ""
    blocks.append(f"Action: {story.ACTIONS.get(action.taken, action.taken)}{reason}.")
    folder = bundle_folder(root, event)
    if folder is not None and (folder / "meta.json").is_file():
        replay = replay_line(shlex.quote(one_line(str(folder))))
        blocks.append(Lines({"Repeat the search for the tokens on one machine:": replay}))
    else:
        blocks.append(_no_bundle(event, folder))
    return Section("proof", "Proof and replay", blocks)


def _no_bundle(event: Event, folder: Path | None) -> str:
    if event.run.trainer == LOOP:
        return "A loop writes no replay bundle."
    if folder is not None and (folder / "event.json").is_file():
        return "The event was written without a bundle, so it cannot be replayed."
    return "The event's bundle is missing, so it cannot be replayed from here."


def _replays(event: Event) -> Iterator[str]:
    """Yield sentences about replays of the step, and about the head's part of the norm."""
    rerun, difference = event.rerun, event.certificate.replay_difference
    if rerun is not None:
        outcome = "it came back" if rerun.is_reproduced else "it did not come back"
        apart = f" ({percent(rerun.difference)} of the spike apart)" if rerun.difference is not None else ""
        yield f"The step's micro-batches run again gave a norm of {number(rerun.norm)}{apart}: {outcome}."
    if difference is not None:
        how = f"differ by a norm of {number(difference, 2)}: the measurement's own error"
        yield f"Two replays of {_REPLAYED[event.certificate.method]} {how if difference else 'agree bit for bit'}."
    if event.head_grad_norm is not None:
        in_all = "" if event.trigger.grad_norm is None else f", of {number(event.trigger.grad_norm, 3)} in all"
        yield f"The output head's part of the gradient has norm {number(event.head_grad_norm, 3)}{in_all}."


_MAX_PROBES = 160
"""Rows of the search's path that are listed, at most."""
_PHASES = {
    "share": "shares of all tokens",
    "coefficients": "loss coefficients",
    "verify": "candidate, measured alone",
    "residual": "what is left without the culprits",
    "sketch": "norms by random directions",
    "bisect": "bisection",
}
"""Names of the search's phases that measure no single part of the batch."""


def _probe(probe: PathEntry) -> tuple[str, ...]:
    """Return a row of the search's path: part, norm, threshold, outcome."""
    places = []
    if probe.micro_batch is not None:
        places.append(f"micro-batch {probe.micro_batch}")
    for noun, interval in (("rank", probe.ranks), ("token", probe.tokens)):
        if interval:
            places.append(numbered(noun, interval[0], interval[1] - 1))
    part = _PHASES.get(probe.phase) or ", ".join(places) or probe.phase
    note = f" ({one_line(probe.note, 200)})" if probe.note else ""
    return part, number(probe.norm, 3), number(probe.threshold, 3), spoken(probe.verdict) + note
