# SPDX-License-Identifier: Apache-2.0
"""Decide what happens to a step that spiked: docs/configuration.md has the actions, docs/method.md (7) their steps.

The decision uses only numbers that every rank has, so all ranks take the same one. It applies to every spike, even
once no more events may be written. ``mask`` and ``heal`` need a search each time; when no more searches are allowed,
they become ``skip``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.selection import Token
from ..record import Action, Certificate
from ..trigger import Spike

_SEARCHED = ("mask", "heal")


@dataclass(frozen=True)
class Outcome:
    """The action on one spike, whether or not an event is written of it."""

    number: int
    """The optimizer step within the update, counted over epochs and mini-batches from 0."""
    grad_norm: float
    """Before clipping and before the action."""
    taken: str
    """One of ``ACTIONS``."""
    is_written: bool


def decide(
    limits: Any,
    spike: Spike,
    certificate: Certificate,
    tokens: Sequence[Token],
    obstacle: str | None = None,
    healed_by: str | None = None,
) -> Action:
    """Choose the action after a search.

    ``mask`` becomes ``skip`` when masking would not bring the norm under the threshold, or would mask more than the
    limits allow. An ``undecided`` verdict is masked if the norm itself, as measured, is under the threshold.

    Args:
        limits: the settings ``gradloc.action``, see :class:`~..config.ActionConfig`.
        spike: why the step was searched; a rehearsal (``forced``) never changes the step.
        certificate: the norm without the culprits.
        tokens: all tokens of all culprits.
        obstacle: why another gradient than the spike cannot be taken; None where it can.
        healed_by: the setting that heals the step, as its line; None where none was measured to.
    """
    act = partial(Action, limits.mode)
    if limits.mode == "observe":
        return act("observe", "that is the mode")
    if spike.kind == "forced":
        return act("observe", "a rehearsal: nothing spiked, so the step goes on as it is")
    if limits.mode not in _SEARCHED:
        return act(limits.mode, "as configured")
    if obstacle is not None:
        return act("skip", f"{'masking' if limits.mode == 'mask' else 'healing'} is not possible: {obstacle}")
    if limits.mode == "heal":
        if healed_by is None:
            return act("skip", "no setting that was measured brings the norm under the threshold")
        return act("heal", f"the step is taken under {healed_by}")
    num_masked, norm = len(tokens), certificate.norm_after
    if not num_masked:
        return act("skip", f"there is no token to mask: {certificate.reason}")
    # the step takes the very gradient whose norm was measured, so the error bound does not matter to it
    is_low = certificate.verdict == "undecided" and norm is not None and norm < (certificate.threshold or 0.0)
    if certificate.verdict != "explained" and not is_low:
        return act("skip", f"masking the culprits would not help: {certificate.reason}")
    most, most_share = limits.max_masked_tokens, limits.max_masked_share
    if num_masked > most:
        return act("skip", f"{num_masked} tokens would be masked, action.max_masked_tokens allows {most}")
    if num_masked > most_share * spike.num_tokens:
        share = f"{num_masked / max(spike.num_tokens, 1):.1%}"
        return act("skip", f"{share} of the tokens would be masked, action.max_masked_share allows {most_share:.1%}")
    return act("mask", "the step is taken without the culprits")


def decide_without_search(limits: Any, spike: Spike, num_searches: int) -> Action | None:
    """Choose the action on a spike that no event will be written of; None if that takes a search, as for ``mask``.

    Args:
        limits: the settings ``gradloc.action``.
        spike: the spike.
        num_searches: searches of this update so far.
    """
    if limits.mode not in _SEARCHED or spike.kind == "forced":
        taken = "observe" if spike.kind == "forced" else limits.mode
        return Action(limits.mode, taken, "as configured")
    most = limits.max_searches_per_step
    if most is not None and num_searches >= most:
        return Action(limits.mode, "skip", f"action.max_searches_per_step allows {most} searches")
    return None
