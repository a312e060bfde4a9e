# SPDX-License-Identifier: Apache-2.0
"""Describe an event: what happened, which numbers prove it, what the optimizer was given.

Nothing is guessed: what the record does not say is left out. Pure, standard library only.
"""

import math

from ..record import Culprit, Event, Search, StepCause, Turn
from .causes import NOTABLE, cause_info
from .culprits import carried, engine_words, group_sentence, repeat_sentence, trusted_share
from .cures import healer
from .documents import document_words
from .faults import fault_sentences
from .numbers import bounded, number, percent
from .text import capitalized, one_line, plural_of, span, times, visible

_COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
_SPANS = {"token": "token", "segment": "span of tokens", "sequence": "response"}
_TRIGGERS = {
    "fixed": "fixed rule",
    "adaptive": "learned from the run",
    "forced": "a rehearsal",
    "non_finite": "NaN and infinity always spike",
}

CERTIFICATES = {
    "explained": "without the culprits the step is healthy, so they explain the spike",
    "not_explained": "without the culprits the step still spikes, so they do not explain it",
    "undecided": "undecided",
    "not_the_data": "no token is accused, since the batch is not at fault",
}
ACTIONS = {
    "observe": "observe: the step was taken unchanged",
    "mask": "mask: the optimizer took the step without the culprits",
    "heal": "heal: the optimizer took the step that another setting gives",
    "skip": "skip: the optimizer took no step",
    "abort": "abort: the run was stopped",
}


_MAX_NAMES = 4
"""Most parameters or tensors named on the first screen."""
_WHOLE = 1.05
"""Share of the gradient that counts as all of it, with room for rounding."""
_MAX_LINES = 4
"""Most lines of text before the culprit, its own included: a chat's prompt has many short ones."""


def quote_of(event: Event) -> tuple[str, str, str] | None:
    """Return the largest culprit's text with the text before and after it; None where there is none."""
    first = event.leader
    if first is None or not first.text:
        return None
    before = "\n".join(visible(first.text_before or "")[-200:].split("\n")[-_MAX_LINES:])
    return before, visible(first.text)[:200], visible(first.text_after or "")[:160]


def named(event: Event) -> str:
    """Name the parameters or tensors that made the spike, where no token did; empty where none are known."""
    cause = step_cause(event)
    names = [one_line(name, 80) for name in cause.names] if cause else []
    if cause is None or not names:
        return ""
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"and {len(names) - _MAX_NAMES} more"]
    return f"{cause_info(cause.label).named} {', '.join(names)}".strip()


def step_cause(event: Event) -> StepCause | None:
    """Return the spike's cause, or a part's, that is no token; None where tokens did it or none is known."""
    cause = event.cause
    is_of_step = cause is not None and cause.reason and cause_info(cause.label).headline
    return cause if is_of_step else None


def cause_of(event: Event) -> str:
    """Return the label of the step's own cause, else of the largest culprit's; empty where there is none."""
    cause, first = step_cause(event), event.leader
    return cause.label if cause else first.cause.label if first else ""


def shown_verdict(event: Event) -> str:
    """Return the certificate's verdict; ``not_the_data`` where another link than the batch broke."""
    is_other = event.fault is not None and event.fault.at not in ("batch", "undecided")
    return "not_the_data" if is_other and not event.culprits else event.certificate.verdict


def headline(event: Event) -> str:
    """Say what happened in one sentence, with no number but the step.

    >>> headline(Event())
    'Nothing was found that made the spike at step 0'
    """
    step, norm, cause = event.step.global_step, event.trigger.grad_norm, step_cause(event)
    is_finite = norm is None or math.isfinite(norm)
    spike, gradient = f"the step-{step} spike", "the gradient"
    if event.model == "critic":
        spike, gradient = f"{spike} of the critic", "the critic's gradient"
    what = spike if is_finite else f"{gradient} of step {step} not finite"
    if event.trigger.kind == "forced":
        what = f"most of step {step}'s gradient (a rehearsal)"
    if not event.culprits and cause:
        words = {"step": step, "spike": what, "Spike": capitalized(what), "reason": cause.reason}
        return cause_info(cause.label).headline.format(**words)
    if not event.culprits:
        return f"Nothing was found that made the spike at step {step}"
    who = culprits_in_words(event)
    if cause:
        return f"{who} made part of {what}; the rest did not come from the tokens"
    if event.certificate.verdict == "not_explained":
        rest = "more culprits are left" if event.search.num_more else "something else spikes, too"
        return f"{who} made part of {what}; {rest}"
    did = "may have made" if event.certificate.verdict == "undecided" and is_finite else "made"
    return f"{who} {did} {what}"


def says_reason(cause: StepCause) -> bool:
    """Return whether the headline has the cause's reason in it."""
    return "{reason}" in cause_info(cause.label).headline


def culprits_in_words(event: Event) -> str:
    """Count the culprits in words: ``One token``, ``Three responses``, ``14 culprits``."""
    count = len(event.culprits)
    spans = {culprit.span for culprit in event.culprits}
    noun, *rest = (span_of(event, spans.pop()) if len(spans) == 1 else "culprit").split(" of ")  # "span of tokens"
    head = _COUNTS[count] if count < len(_COUNTS) else f"{count:,}"
    return " of ".join([f"{head} {noun if count == 1 else plural_of(noun)}", *rest])


def span_of(event: Event, span: str) -> str:
    """Name a kind of span; a whole row is a document in a loop without advantages, else a response."""
    if event.is_without_tokens:
        return {"token": "position", "sequence": "row"}.get(span, "span of positions")
    return "document" if span == "sequence" and event.is_supervised else _SPANS.get(span, "culprit")


def lede(event: Event) -> str:
    """Say what the culprits carry and why, or what else made the spike."""
    first, cause, search = event.leader, step_cause(event), event.search
    other = _cause_in_words(cause) if cause else ""
    if first is None:
        if cause and says_reason(cause):
            other = " ".join(fault_sentences(event))
        other = other or (f"The search stopped because {search.stop_reason}." if search.stop_reason else "")
        return " ".join(filter(None, (other, first_place(event))))
    share = carried(event, event.culprits)
    subject = "It carries" if len(event.culprits) == 1 else "Together they carry"
    if event.is_without_tokens and len(event.culprits) == 1:  # no text shows which it is
        subject = f"{capitalized(_row_and_position(event, first))} carries"
    rest = "" if _is_part(event) else "; the other tokens pull the other way"
    odd, info = odd_number(first), cause_info(first.cause.label)
    why = f": {f'{info.odd} {odd}'.strip()}" if odd else engine_words(first)
    sentences = (
        f"{subject} {share} of the gradient{rest}." if share is not None else "",
        f"{info.title}{why}.",
        document_words(first),
        repeat_sentence(first),
        first_place(event),
        group_sentence(event),
        f"At least {search.num_more} more are left." if search.num_more else "",
        other,
    )
    return " ".join(filter(None, sentences))


def first_place(event: Event) -> str:
    """Say in which module NaN or infinity first appears; empty where that is not known."""
    first = event.first_not_finite
    if first is None:
        return ""
    what = "the output" if first.way == "forward" else "the gradient of the output"
    before = ", ".join(f"{one_line(name, 60)} {number(size, 3)}" for name, size in reversed(first.before.items()))
    largest = f"; the largest values right before it: {before}" if before else ""
    return f"It first appears in {what} of {one_line(first.module, 60)}{largest}."


def _is_part(event: Event) -> bool:
    """Return whether the culprits carry at most the whole gradient; they carry more where others pull against them."""
    return math.fsum(trusted_share(event, culprit) or 0.0 for culprit in event.culprits) < _WHOLE


def _cause_in_words(cause: StepCause) -> str:
    """Describe a cause that is no token's, and where to look."""
    if cause.label == "transient":  # the reason is the headline already
        return "Hardware or a race made it, not the data."
    text = f"{capitalized(cause.reason)}."
    if cause.places:
        row, position = cause.places[0]
        where = "" if row is None else f"row {row} of the batch, "
        more = f", and {len(cause.places) - 1} more" if len(cause.places) > 1 else ""
        text += f" The first: {where}response position {position}{more}."
    over_run = cause.numbers.get("advantage_over_run")
    if cause.label == "batch_scale" and over_run is not None:
        scaled = "the loss or the ratios scale it"
        why = scaled if over_run < NOTABLE else "it is the rewards, or how they are normalized"
        text += f" Its advantages are {number(over_run, 3)} times the run's usual: {why}."
    return text


def odd_number(culprit: Culprit) -> str:
    """Return how odd the culprit's main factor is, such as ``9.1 times the typical size``; empty if unknown."""
    usual = culprit.cause.numbers.get("batch_advantage")
    if usual is not None:
        return f"half of the batch's are over {number(usual, 3)}"
    value = culprit.cause.numbers.get(f"{cause_info(culprit.cause.label).factor}_over_typical")
    return f"{number(value, 3)} times the typical size" if value is not None and math.isfinite(value) else ""


def figures(event: Event) -> list[tuple[str, str, str]]:
    """Return three figures as (value, caption, remark): the norm, the norm without the culprits, the threshold."""
    certificate, trigger = event.certificate, event.trigger
    norm = trigger.grad_norm if trigger.grad_norm is not None else certificate.norm_before
    threshold = trigger.threshold if trigger.threshold is not None else certificate.threshold
    excess = times(norm, threshold)
    over = f"{number(excess, 3)} times the threshold" if excess is not None else "of the whole step"
    return [
        (number(norm, 3), "gradient norm", over),
        _figure_without(event),
        (number(threshold, 3), "threshold", _TRIGGERS.get(trigger.kind, trigger.kind)),
    ]


def _figure_without(event: Event) -> tuple[str, str, str]:
    """Return the figure of the norm without its cause, or of the cause's own number."""
    certificate, cause = event.certificate, step_cause(event)
    if cause and not event.culprits:
        name, caption, remark, unit = cause_info(cause.label).figure
        value = cause.numbers.get(name)
        if value is not None:
            return number(value, 3) + unit, caption, remark
    if not event.culprits and not cause:
        return "0", "culprits found", event.search.status.replace("_", " ")
    norm, margin = bounded(certificate.norm_after, certificate.error_bound, 3)
    how = f"measured{margin}" if certificate.error_bound is not None else certificate.method
    what = "the padding" if cause and cause.label == "non_finite_padding" else pronoun(event)
    return norm, f"norm without {what}", how if certificate.norm_after is not None else "not measured"


def pronoun(event: Event) -> str:
    """Return ``it`` or ``them`` for the culprits; ``that`` where no token made the spike."""
    return "that" if not event.culprits else "it" if len(event.culprits) == 1 else "them"


def what_followed(event: Event, clip: float | None = None) -> list[str]:
    """Say what the optimizer did with the step and what follows; ``clip`` as in :func:`what_was_taken`."""
    sentences, cause, consequence = [what_was_taken(event, clip)], step_cause(event), event.consequence
    if cause and cause.label == "non_finite_weights":
        sentences.append("Every further step will be like it until weights that are finite are loaded.")
    if consequence and consequence.last_checkpoint:
        sentences.append(f"The newest checkpoint before it: {one_line(consequence.last_checkpoint, 120, keep='end')}.")
    return [sentence for sentence in sentences if sentence]


def what_was_taken(event: Event, clip: float | None = None) -> str:
    """Say what the optimizer was given; ``clip`` is the clip limit where the event does not have it."""
    action = event.action
    clip = event.consequence.grad_clip if event.consequence is not None else clip
    if action.taken == "skip":
        asked = f" {action.requested.capitalize()} was asked for, but {one_line(action.reason)}."
        return f"The optimizer took no step: this mini-batch was skipped.{asked if action.requested != 'skip' else ''}"
    if action.taken == "abort":
        return "The run was stopped before the step was taken."
    if action.taken == "mask":
        after = _norm_after(event)
        size = "" if after is None else f", of norm {bounded(after, event.certificate.error_bound, 3)[0]}"
        clipped = f", clipped to {number(clip, 3)}" if after is not None and clip and after > clip else ""
        return f"The optimizer took the step without {pronoun(event)}{size}{clipped}."
    if action.taken == "heal":
        cured = healer(event)
        under = "another setting" if cured is None else f"{one_line(cured.line)}, of norm {number(cured.norm_after, 3)}"
        return f"The optimizer took the step under {under}."
    return _what_was_taken_unchanged(event, clip)


def _norm_after(event: Event) -> float | None:
    """Return the norm without the culprits; None where it was not measured or is not finite."""
    after = event.certificate.norm_after
    return after if after is not None and math.isfinite(after) else None


def _what_was_taken_unchanged(event: Event, clip: float | None) -> str:
    """Say what a step that gradloc did not change gave the optimizer; empty where its norm is not known."""
    norm, after, consequence = event.trigger.grad_norm, _norm_after(event), event.consequence
    if norm is None:
        return ""
    if not math.isfinite(norm):
        if consequence is not None and consequence.is_taken:
            return "The optimizer took the step, so the weights are not finite any more."
        return "The trainer skipped the step, because its norm was not finite."
    if clip is None:
        return "The optimizer took the step with the spike in it."
    if norm <= clip:
        return f"The optimizer took the step unchanged: its norm is within the clip limit of {number(clip, 3)}."
    share = carried(event, event.culprits) if _is_part(event) else None
    whose = "theirs"
    if len(event.culprits) == 1:
        noun, *_ = span_of(event, event.culprits[0].span).split(" of ")  # "span of tokens" has its genitive at "span"
        whose = f"that {noun}'s"
    took = f"; {share} of the clipped update was {whose}" if share is not None else ", and the optimizer took it"
    said = f"Clipping to {number(clip, 3)} divided the whole step by {number(norm / clip, 3)}{took}."
    if not after or event.certificate.verdict != "explained":
        return said
    healthy = consequence.healthy_norm if consequence else None
    kept = (after * clip / norm if healthy is None else healthy) / min(clip, after)
    return f"{said} The same clipping scaled the other tokens' gradient down to {percent(kept, 2)} of its size."


# ---- the verdict, a few sentences for a reader who has never seen an event


def verdict_sentences(event: Event) -> str:
    """Say what happened, in printable characters; others in a token are escaped."""
    sentences = [f"{headline(event)}.", _where(event), lede(event), _norms(event), what_was_taken(event)]
    return " ".join(_printable(sentence) for sentence in sentences if sentence)


def quote(culprit: Culprit) -> str:
    """Quote the culprit's text, cut short; its token numbers where no text is kept (evidence.text=off)."""
    return f'"{_printable((culprit.text or "<?>")[:40])}"'


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _where(event: Event) -> str:
    first = event.leader
    if first is None or not first.positions:
        return ""
    start, position = "It is" if len(event.culprits) == 1 else "The largest is", first.positions[0]
    if event.is_without_tokens:
        return f"{start} {_row_and_position(event, first)}."
    what = f"the token {quote(first)} at position {position}"
    if len(first.positions) > 1:
        what = f"{len(first.positions)} tokens from position {position}"
    row = "document" if event.is_supervised else "response"
    return f"{start} {what} of the {row} {_sequence(event, first)}{_turn(first.turn)}."


def quote_or_row(event: Event, culprit: Culprit) -> str:
    """Quote the culprit's text; name its row where there are no tokens."""
    return _row_and_position(event, culprit) if event.is_without_tokens else quote(culprit)


def _row_and_position(event: Event, culprit: Culprit) -> str:
    """Name a culprit without tokens: ``row 17``, ``position 3 of row 17``."""
    place = "" if culprit.span == "sequence" else f"position {span(culprit.positions)} of "
    return place + _sequence(event, culprit).removeprefix("in ")


def _turn(turn: Turn | None) -> str:
    if turn is None:
        return ""
    after = f" after the tool's answer of {turn.num_before} tokens" if turn.num_before else ""
    return f", in turn {turn.number} of {turn.num_turns}{after}"


def _sequence(event: Event, culprit: Culprit) -> str:
    if culprit.sequence_id is None:
        micro_batch = f" of micro-batch {culprit.micro_batch}" if (event.step.num_micro_batches or 0) > 1 else ""
        rank = f", rank {culprit.rank}" if (event.step.dp_size or 0) > 1 else ""
        return f"in row {culprit.micro_batch_row}{micro_batch}{rank}"
    uid, colon, index = culprit.sequence_id.rpartition(":")
    if not colon:  # a name of the loop's own
        return index if len(index) <= 40 else f"{index[:40]}..."
    return f"{uid if len(uid) <= 16 else uid[:8]}:{index}"  # verl's uids have 36 characters; 8 are unique enough


def _norms(event: Event) -> str:
    """Say the norm with and without its cause, and what that proves."""
    norm, threshold, certificate = event.trigger.grad_norm, event.trigger.threshold, event.certificate
    was = "The norm was not finite"
    if norm is not None and math.isfinite(norm):
        excess = times(norm, threshold)
        over = f", {number(excess, 3)} times the threshold of {number(threshold, 3)}" if excess is not None else ""
        was = f"The norm was {number(norm, 3)}{over}"
    left, is_culprits = certificate.norm_after, bool(event.culprits)
    if not is_culprits and (step_cause(event) is None or certificate.method == "none"):
        return f"{was}."
    if left is None or not math.isfinite(left):
        unknown = f"; the norm without {pronoun(event)} is not known: {certificate.reason}"
        return f"{was}{unknown if is_culprits and certificate.reason else ''}."
    without = f"{was}; {''.join(bounded(left, certificate.error_bound, 3))} without {pronoun(event)}"
    if not is_culprits:
        return f"{without}."
    if certificate.verdict == "explained":
        return f"{without}: the spike is explained."
    if certificate.verdict == "not_explained":
        return f"{without}, still over the threshold: {_rest(event.search)}."
    return f"{without}. Whether that explains the spike is undecided: {certificate.reason}."


def _rest(search: Search) -> str:
    """Say what else spikes where the norm is still over the threshold."""
    if not search.num_more:
        return "something else spikes, too"
    norm = f" of about {number(search.more_norm, 3)}" if search.more_norm else ""
    return f"search.max_culprits ended the search, and at least {search.num_more} culprits{norm} are left"
