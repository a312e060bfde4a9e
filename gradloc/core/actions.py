# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What happens to the step that spiked. The decision is pure, so that every rank takes the same one.

``observe`` leaves it as it is. ``mask`` takes the step that the batch without the culprits would have taken. ``skip``
takes none. ``abort`` takes none and stops the run once the event is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .certificate import Certificate
from .selection import Token
from .trigger import Spike

__all__ = ["ACTIONS", "Action", "ActionLimits", "decide"]

ACTIONS = ("observe", "mask", "skip", "abort")


class ActionLimits(Protocol):
    """What may be done to a step that spiked: ``gradloc.action`` of the config."""

    mode: str
    """One of ``ACTIONS``."""
    max_masked_tokens: int
    max_masked_share: float
    """Of the mini-batch's tokens, in (0, 1]."""


@dataclass(frozen=True)
class Action:
    """What was asked for, and what is done with the step."""

    requested: str
    taken: str
    reason: str


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
    if certificate.verdict == "undecided" and certificate.norm_after < (certificate.threshold or 0.0):
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
