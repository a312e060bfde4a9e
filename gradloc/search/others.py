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
"""What of a gradient is not its tokens': asked where the shares do not add up to 1."""

import math
from dataclasses import dataclass, replace

import torch

from ..core.gradients import Gradient
from .share import ShareMap, measure_shares
from .task import Source, Task
from .triage import TRANSIENT, suspects

__all__ = ["Parts", "doubt_backward", "split_off"]

_STABLE = 1.5  # two step sizes give closure alike: within this factor
_REPEATS = 0.1  # of the norm: kernels that are not bit-reproducible differ by less


@dataclass(frozen=True)
class Parts:
    """A gradient in two: what passes through tokens, and the rest."""

    tokens: Gradient
    others: Gradient
    tokens_norm: float
    others_norm: float
    source: Source


def split_off(task: Task) -> Parts | None:
    """Measure the gradient that is left when no token passes any: a loss of a router's, a regulariser's.

    Returns:
        None, after one probe, where it is less than a culprit's worth.
    """
    prober, space = task.prober, task.prober.space
    num = prober.step.num_micro_batches
    if not task.can_afford(backwards=num):
        return None
    prober.compute([(0, torch.zeros_like(prober.step.token_mask(0)))])
    if num * space.norm() < task.culprit_norm:
        return None
    prober.compute((index, torch.zeros_like(prober.step.token_mask(index))) for index in range(num))
    squares, others = space.squares_by_name(), space.take()
    others_norm = math.fsum(squares.values()) ** 0.5
    if others_norm < task.culprit_norm:
        return None
    prober.add(task.gradient, alpha=1.0 / task.scale)
    prober.add(others, alpha=-1.0)
    of_tokens = space.squares_by_name()
    tokens_norm = math.fsum(of_tokens.values()) ** 0.5
    bound = torch.finfo(prober.step.compute_dtype).eps * others_norm  # both were added up in the backward
    why = (
        f"a part of the gradient, of norm {others_norm:.3g}, passes through no token's log-prob or entropy; the "
        f"tokens' part has norm {tokens_norm:.3g} (within {bound:.2g})"
    )
    numbers = {"tokens_norm": tokens_norm, "others_norm": others_norm, "error_bound": bound}
    source = Source("not_tokens", why, numbers, suspects(squares, of_tokens))
    return Parts(space.take(), others, tokens_norm, others_norm, source)


def doubt_backward(task: Task, shares: ShareMap) -> tuple[Source, float] | None:
    """Where the gradient is not what the log-probs' change says: why, and the norm as everything is run again.

    It is not the tokens' when it does not come back, or when two step sizes agree about how far it is off: then
    something scales it on its way, a hook or a backward of somebody's own. One or two passes over all micro-batches.

    Args:
        task: what is searched.
        shares: along the spike's gradient.
    """
    prober, space = task.prober, task.prober.space
    everything = range(prober.step.num_micro_batches)
    if shares.unseen or not task.can_afford(forwards=2 * len(everything), backwards=len(everything)):
        return None
    prober.compute((index, None) for index in everything)
    norm = space.norm()
    prober.add(task.gradient, alpha=-1.0 / task.scale)
    difference = space.norm() / task.spike.grad_norm
    if difference > _REPEATS:
        return Source("transient", TRANSIENT, {"rerun_norm": norm, "rerun_difference": difference}), norm
    readouts = prober.ranks.agree(lambda: task.readouts([]))
    half = replace(shares, step=shares.step / 2)
    second = measure_shares(prober, readouts, task.gradient, task.scale, everything, half)
    if not (second.closure and 1 / _STABLE < shares.closure / second.closure < _STABLE):
        return None
    why = "the gradient is not the derivative of the tokens' log-probs: something scales it in the backward"
    numbers = {"closure": shares.closure, "tokens_norm": shares.closure * task.spike.grad_norm}
    return Source("not_tokens", why, numbers, suspects(space.squares_by_name(task.gradient))), norm
