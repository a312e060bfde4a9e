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
"""Whether a spike is a few tokens' at all: of a batch of which all is loud the loudest rows are no culprits."""

from .candidates import Candidate
from .share import ShareMap
from .task import Task

__all__ = ["MUCH", "are_few", "carried", "why_spread"]

MUCH = 0.5  # of a spike, that few spans carry together where they are worth naming though more than may be named,
_MOST = 0.75  # that culprits carry beside a healthy rest,
_ABOVE = 10.0  # times their part of the batch's tokens: in a batch that is scaled as a whole spans carry less;
_NEARLY_ALL = 0.9  # of a spike:
_WELL_ABOVE = 3.0  # then this many times their part is enough, since none of few rows can carry ten times its part


def carried(task: Task, shares: ShareMap, spans: list[Candidate]) -> tuple[float, float]:
    """What part of the direction these spans carry at least, and what part of the batch's tokens they are."""
    num_tokens = sum(len(candidate.tokens) for candidate in spans)
    part = sum(candidate.bound for candidate in spans) / shares.square**0.5
    return part, num_tokens / max(task.spike.num_tokens, 1)


def are_few(task: Task, shares: ShareMap, spans: list[Candidate]) -> bool:
    """Whether some first ones of these spans carry much of the direction, and far more than their part."""
    for count in range(1, len(spans) + 1):
        much, part = carried(task, shares, spans[:count])
        if much > max(MUCH, _ABOVE * part) or much > max(_NEARLY_ALL, _WELL_ABOVE * part):
            return True
    return False


def why_spread(task: Task, shares: ShareMap, spans: list[Candidate], room: int) -> str | None:
    """Why the spans that carry most of the spike are no more than a part of it; None where they are worth naming.

    Without tokens that carry the part s of R its norm is at least (1 - s) ||R||. Where that spikes for as many as may
    be named, they are worth naming as the loudest of a few. Else they may explain the spike, and are worth it where
    they carry what culprits beside a healthy rest of half the threshold do, or far more than their part.

    Args:
        task: with a threshold.
        shares: as measured.
        spans: that may be culprits.
        room: how many may still be named.
    """
    assert task.spike.threshold is not None, "a rehearsal has nothing to explain"
    if not spans:
        return "no span of tokens carries a culprit's part of it"
    much, part = carried(task, shares, spans[:room])
    if (1 - much - abs(1 - shares.closure)) * shares.square**0.5 <= task.spike.threshold:
        if much > min(_MOST * shares.closure, _ABOVE * part):
            return None
        return f"the loudest spans, {part:.0%} of the batch's tokens, carry {much:.0%} of it"
    if are_few(task, shares, spans):
        return None
    return f"{room} spans carry {much:.0%} of it at most; without them the norm is still over the threshold"
