# SPDX-License-Identifier: Apache-2.0
"""A spike whose search fails at a chosen place on chosen ranks, and the optimizer steps that follow."""

import hashlib
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradloc.core import ranks as core_ranks
from gradloc.core.gradients import GradientSpace, local_shard
from gradloc.core.localizer import Localizer
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import StepPolicy
from gradloc.evidence.layers import head_square
from gradloc.search.find import localize
from tests.bare import BareStep, build, clip_gradient, random_batch, shard

PLANT = {(3, 2): 1e4}
NUM_MICRO_BATCHES = 2
PLACES = ("before", "block", "loss", "backward")
"""Before the forward; in the first of two blocks; behind the last collective of the forward; in the backward."""


class Injected(RuntimeError):
    """What is raised."""


class FailingStep(BareStep):
    """Fails in the ``number``-th pass of the search (from 1) at one of ``PLACES``."""

    def arm(self, place: str, number: int) -> None:
        self.place, self.left = place, number

    def forward(self, micro_batch: int):
        return self._pass(lambda: super(FailingStep, self).forward(micro_batch), has_backward=False)

    def entropies(self, micro_batch: int):
        return self._pass(lambda: super(FailingStep, self).entropies(micro_batch), has_backward=False)

    def loss(self, micro_batch: int, selected: torch.Tensor | None):
        return self._pass(lambda: super(FailingStep, self).loss(micro_batch, selected), has_backward=True)

    def _pass(self, run, has_backward: bool):
        if self.place == "backward" and not has_backward:
            return run()
        self.left -= 1
        if self.left != 0:
            return run()
        if self.place == "before":
            raise Injected
        with _failing_block(self.model, self.place):
            found = run()
        if self.place == "loss":
            raise Injected
        return found


@contextmanager
def _failing_block(model: torch.nn.Module, place: str):
    def fail(*_):
        raise Injected

    def fail_in_backward(module, inputs, output):
        output.register_hook(fail)

    block = model.blocks[0]
    handles = []
    if place == "block":
        handles.append(block.register_forward_pre_hook(fail))
    elif place == "backward":
        handles.append(block.register_forward_hook(fail_in_backward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Powers:
    clip_limit, scales_loss = 1.0, False

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def clip(self) -> torch.Tensor:
        return clip_gradient(self.model, 1.0)

    def save_weights(self, global_step: int) -> None:
        return None


class _Limits:
    max_masked_tokens, max_masked_share, max_searches_per_step = 64, 0.05, None

    def __init__(self, mode: str):
        self.mode = mode


def train(
    layout: str,
    place: str = "",
    number: int = 0,
    failing: Sequence[int] = (),
    patience_s: float = 20.0,
    mode: str = "observe",
) -> dict:
    """Two optimizer steps, the first with a spike; at ``number`` 0 without gradloc.

    Returns:
        ``weights``, a hash of this rank's; ``failures`` and ``events``, how many there were.
    """
    core_ranks._PATIENCE_S = patience_s
    model = shard(build("tiny"), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    search = partial(localize, budget=64)
    localizer = Localizer(_Powers(model), Ranks(), _Limits(mode), search, lambda looked: looked, head_square)
    rank = dist.get_rank() if dist.is_initialized() else 0
    num_events = 0
    for seed, plants in enumerate((PLANT, {})):
        batch = random_batch(build("tiny"), seed=seed).planted(plants)
        space = GradientSpace(model)
        step = FailingStep(model, batch, NUM_MICRO_BATCHES)
        step.arm(place, number if rank in failing else -1)
        space.clear()
        policy = StepPolicy(seed, "fixed", [batch.num_tokens], [20.0], [20.0 * batch.num_tokens**0.5], max_events=1)
        localizer.begin_update(policy if number else None, space)
        localizer.begin_mini_batch(step)
        step.train(localizer.after_backward)
        localizer.before_step(clip_gradient(model, 1.0))
        localizer.end_update()
        num_events += len(localizer.events)
        optimizer.step()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(local_shard(param).detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {"weights": digest.hexdigest(), "failures": localizer.num_failures, "events": num_events}


def fail_apart(patience_s: float = 1.0) -> str:
    """Both ranks fail, the first with a collective open that the second has not issued; the error's type."""
    core_ranks._PATIENCE_S = patience_s
    ranks, work = Ranks(), []

    def joint():
        if ranks.is_first:
            work.append(dist.all_reduce(torch.ones(1), async_op=True))
        raise Injected

    try:
        ranks.together(joint)
    except RuntimeError as error:
        if not work:  # close what is open, so that the world can go on
            dist.all_reduce(torch.ones(1))
        return type(error).__name__


def train_past_every_pass(
    layout: str, place: str, failing: Sequence[int], mode: str = "observe"
) -> list[dict[str, Any]]:
    """:func:`train` without gradloc, then failing at pass 1, 2, ... until the search has no more."""
    answers = [train(layout)]
    while len(answers) == 1 or answers[-1]["failures"]:
        answers.append(train(layout, place, len(answers), failing, mode=mode))
    return answers
