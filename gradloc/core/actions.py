# SPDX-License-Identifier: Apache-2.0
"""What happens to the step that spiked. The decision is pure, so that every rank takes the same one.

``observe`` leaves it as it is. ``mask`` takes the step that the batch without the culprits would have taken. ``skip``
takes none. ``abort`` takes none and stops the run. An action applies to every spike, however few events may be
written. ``mask`` needs a search for each; where the number of searches is limited, it falls back to ``skip``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..record import Action, Certificate
from .selection import Token
from .trigger import Spike

ACTIONS = ("observe", "mask", "skip", "abort")


class ActionLimits(Protocol):
    """What may be done to a step that spiked: ``gradloc.action`` of the config."""

    mode: str
    """One of ``ACTIONS``."""
    max_masked_tokens: int
    max_masked_share: float
    """Of the mini-batch's tokens, in (0, 1]."""
    max_searches_per_step: int | None
    """Of one update; None for no limit."""


@dataclass(frozen=True)
class Outcome:
    """A spike of an update, whether an event is written of it or not."""

    number: int
    """Of the optimizer step, counted over epochs and mini-batches from 0."""
    grad_norm: float
    """Before clipping and before the action."""
    taken: str
    is_written: bool


def decide(
    limits: ActionLimits,
    spike: Spike,
    certificate: Certificate,
    tokens: Sequence[Token],
    obstacle: str | None = None,
) -> Action:
    """Choose the action that is taken.

    Args:
        limits: what was asked for, and how much may be masked.
        spike: why the step was looked into; nothing is done on a rehearsal.
        certificate: what the norm is without the culprits.
        tokens: all tokens of all culprits.
        obstacle: why a recomputed gradient could not be used.

    Returns:
        The action. ``mask`` falls back to ``skip`` where the norm without the culprits is not under the threshold (as
        measured, where the verdict is ``undecided``), or where more would be masked than the limits allow.
    """
    taken, reason = _decide(limits, spike, certificate, len(tokens), obstacle)
    return Action(limits.mode, taken, reason)


def decide_without_search(limits: ActionLimits, spike: Spike, num_searches: int) -> Action | None:
    """The action on a spike that no event will be written of; None where only a search can tell.

    Args:
        limits: what was asked for.
        spike: why it is one.
        num_searches: of this update so far.
    """
    if limits.mode != "mask" or spike.kind == "forced":
        taken = "observe" if spike.kind == "forced" else limits.mode
        return Action(limits.mode, taken, "as configured")
    most = limits.max_searches_per_step
    if most is not None and num_searches >= most:
        return Action(limits.mode, "skip", f"action.max_searches_per_step allows {most} searches")
    return None


def _decide(
    limits: ActionLimits, spike: Spike, certificate: Certificate, num_masked: int, obstacle: str | None
) -> tuple[str, str]:
    if limits.mode == "observe":
        return "observe", "the step goes on as it is"
    if spike.kind == "forced":
        return "observe", "a rehearsal: nothing spiked, so the step goes on as it is"
    if limits.mode != "mask":
        return limits.mode, "as configured"
    if obstacle is not None:
        return "skip", f"masking is not possible: {obstacle}"
    if not num_masked:
        return "skip", f"there is no token to mask: {certificate.reason}"
    after = certificate.norm_after
    if certificate.verdict == "undecided" and after is not None and after < (certificate.threshold or 0.0):
        pass  # the masked step is recomputed, so what was measured is what is taken
    elif certificate.verdict != "explained":
        return "skip", f"masking the culprits would not help: {certificate.reason}"
    most, most_share = limits.max_masked_tokens, limits.max_masked_share
    if num_masked > most:
        return "skip", f"{num_masked} tokens would be masked, action.max_masked_tokens allows {most}"
    if num_masked > most_share * spike.num_tokens:
        share = f"{num_masked / max(spike.num_tokens, 1):.1%}"
        return "skip", f"{share} of the tokens would be masked, action.max_masked_share allows {most_share:.1%}"
    return "mask", "the step is taken without the culprits"
