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

from .certificate import Certificate
from .selection import Token

__all__ = ["ACTIONS", "decide"]

ACTIONS = ("observe", "mask", "skip", "abort")


def decide(
    requested: str,
    certificate: Certificate,
    tokens: Sequence[Token],
    num_tokens: int,
    max_masked_tokens: int,
    max_masked_share: float,
    is_rehearsal: bool,
    obstacle: str | None = None,
) -> tuple[str, str]:
    """Choose the action that is taken.

    Args:
        requested: one of ``ACTIONS``.
        certificate: what the norm is without the culprits.
        tokens: all tokens of all culprits.
        num_tokens: response tokens of the mini-batch over all ranks.
        max_masked_tokens: mask at most this many tokens.
        max_masked_share: mask at most this share of the mini-batch's tokens, in (0, 1].
        is_rehearsal: nothing spiked, so nothing is done.
        obstacle: why a recomputed gradient could not be used.

    Returns:
        (action taken, reason). ``mask`` falls back to ``skip`` where the culprits do not explain the spike, or where
        more would be masked than the budgets allow.
    """
    if requested == "observe":
        return "observe", "the step goes on as it is"
    if is_rehearsal:
        return "observe", "a rehearsal: nothing spiked, so the step goes on as it is"
    if requested != "mask":
        return requested, "as configured"
    if obstacle is not None:
        return "skip", f"masking is not possible: {obstacle}"
    if certificate.verdict != "explained":
        return "skip", f"masking the culprits would not help: {certificate.reason}"
    if len(tokens) > max_masked_tokens:
        return "skip", f"{len(tokens)} tokens would be masked, action.max_masked_tokens allows {max_masked_tokens}"
    if len(tokens) > max_masked_share * num_tokens:
        share = f"{len(tokens) / max(num_tokens, 1):.1%}"
        return "skip", f"{share} of the tokens would be masked, action.max_masked_share allows {max_masked_share:.1%}"
    return "mask", "the step is taken without the culprits"
