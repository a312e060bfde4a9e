# SPDX-License-Identifier: Apache-2.0
"""A spike whose search fails at a chosen place on chosen ranks, and the optimizer steps that follow.

The places are in the search's passes (``PLACES``, see :class:`FailingStep`), or what a rank computes between them and
between collectives (``ALLOCATION``, see :class:`FailingRanks`).
"""

import hashlib
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gradloc.config import ActionConfig, EvidenceConfig, GradLocConfig
from gradloc.core import ranks as core_ranks
from gradloc.core.gradients import GradientSpace, local_shard
from gradloc.core.ranks import Ranks
from gradloc.loop.localizer import Localizer
from gradloc.loop.wire import Policy
from tests.bare import BareStep, Batch, build, clip_gradient, random_batch, shard

PLANT = {(3, 2): 1e4, (9, 1): 1e4}
NUM_MICRO_BATCHES = 2
PLACES = ("before", "block", "loss", "backward")
"""Before the forward; in the first of two blocks; behind the last collective of the forward; in the backward."""


ALLOCATION = "allocation"
"""A tensor that a rank makes by itself, outside of passes and collectives."""


class Injected(RuntimeError):
    """What is raised."""


class FailingRanks(Ranks):
    """Fails at the ``number``-th allocation (from 1) of a search, made outside of its passes and collectives."""

    def arm(self, number: int) -> None:
        self._allocations, self._is_armed = _Allocations(number), number > 0
        self._depth = 0

    def together(self, joint):
        """The outermost call is the search, those within are its passes."""
        self._depth += 1
        try:
            if self._depth == 1 and self._is_armed:
                return super().together(partial(self._allocations.watch, joint))
            with self._allocations.unwatched():
                return super().together(joint)
        finally:
            self._depth -= 1

    def sum(self, values):
        with self._allocations.unwatched():
            return super().sum(values)

    def max(self, values):
        with self._allocations.unwatched():
            return super().max(values)

    def gather(self, value):
        with self._allocations.unwatched():
            return super().gather(value)

    def gather_first(self, value):
        with self._allocations.unwatched():
            return super().gather_first(value)

    def sent_by(self, rank, value):
        with self._allocations.unwatched():
            return super().sent_by(rank, value)


class _Allocations(TorchDispatchMode):
    """Counts operations that make a tensor with memory of its own, and fails at one."""

    def __init__(self, number: int):
        super().__init__()
        self._left, self._is_watching = number, False

    def watch(self, joint):
        with self:
            self._is_watching = True
            try:
                return joint()
            finally:
                self._is_watching = False

    @contextmanager
    def unwatched(self):
        before, self._is_watching = self._is_watching, False
        try:
            yield
        finally:
            self._is_watching = before

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if self._is_watching and isinstance(made, torch.Tensor) and not _is_of(made, args):
            self._left -= 1
            if self._left == 0:
                raise Injected(f"no memory for {operation}")
        return made


def _is_of(made: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a tensor has its memory from one of the operands."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return any(made is arg or made.untyped_storage()._cdata == arg.untyped_storage()._cdata for arg in operands)


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
    clip_limit, scales_loss, takes_what_is_not_finite = 1.0, False, False

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def clip(self) -> torch.Tensor:
        return clip_gradient(self.model, 1.0)

    def save_weights(self, global_step: int) -> None:
        return None


@cache
def _batch(seed: int) -> Batch:
    return random_batch(build("tiny"), seed=seed)


def train(
    layout: str,
    place: str = "",
    number: int = 0,
    failing: Sequence[int] = (),
    patience_s: float = 20.0,
    mode: str = "observe",
) -> dict:
    """Two optimizer steps, the first with a spike; at ``number`` 0 without gradloc, at -1 with nothing that fails.

    Returns:
        ``weights``, a hash of this rank's; ``failures`` and ``events``, how many there were.
    """
    core_ranks._PATIENCE_S = patience_s
    model = shard(build("tiny"), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = FailingRanks()
    settings = GradLocConfig(action=ActionConfig(mode), evidence=EvidenceConfig(bundle="full"))
    localizer = Localizer(_Powers(model), ranks, settings)
    rank = dist.get_rank() if dist.is_initialized() else 0
    num_events = 0
    for seed, plants in enumerate((PLANT, {})):
        batch = _batch(seed).planted(plants)
        space = GradientSpace(model, ranks)
        step = FailingStep(model, batch, NUM_MICRO_BATCHES)
        step.arm(place, number if rank in failing and place != ALLOCATION else -1)
        ranks.arm(number if rank in failing and place == ALLOCATION else -1)
        space.clear()
        policy = Policy(seed, "fixed", [batch.num_tokens], [20.0], [20.0 * batch.num_tokens**0.5], max_events=1)
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
    layout: str, place: str, failing: Sequence[int], mode: str = "observe", stride: int = 1
) -> list[dict[str, Any]]:
    """:func:`train` without gradloc, then failing at place 1, 1 + ``stride``, ... until the search has no more."""
    answers = [train(layout)]
    while len(answers) == 1 or answers[-1]["failures"]:
        answers.append(train(layout, place, 1 + stride * (len(answers) - 1), failing, mode=mode))
    return answers
