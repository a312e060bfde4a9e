# SPDX-License-Identifier: Apache-2.0
"""Make a search fail on chosen ranks, in one of its passes or out of memory, and train on."""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradloc.config import ActionConfig, EvidenceConfig, GradLocConfig
from gradloc.core import memory
from gradloc.core import ranks as core_ranks
from gradloc.core.gradients import GradientSpace
from gradloc.core.memory_plans import PLANS, Memory, MemoryNeed
from gradloc.core.ranks import Ranks
from gradloc.core.sharding import local_shard
from gradloc.loop.localizer import Localizer
from gradloc.loop.messages import Policy
from tests.core.card import Card
from tests.toy_model import Batch, ToyStep, ToyTrainer, build, clip_gradient, random_batch, shard

PLANT = {(3, 2): 1e4, (9, 1): 1e4}
NUM_MICRO_BATCHES = 2
PLACES = ("before", "block", "loss", "backward")
"""Before the forward; in the first of two blocks; behind the last collective of the forward; in the backward."""


class Injected(RuntimeError):
    """An injected failure."""


class FailingStep(ToyStep):
    """Fails in the ``number``-th pass of the search (from 1) at one of ``PLACES``."""

    def arm(self, place: str, number: int) -> None:
        self.place, self.left = place, number

    def forward(self, micro_batch: int, needs_entropy: bool = False):
        has_backward = torch.is_grad_enabled()
        return self._pass(lambda: super(FailingStep, self).forward(micro_batch, needs_entropy), has_backward)

    def forward_rows(self, rows):
        return self._pass(lambda: super(FailingStep, self).forward_rows(rows), True)

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
    dtype: str = "float32",
    card: Card | None = None,
    around_search: Callable[[], None] = lambda: None,
) -> dict:
    """Two optimizer steps, the first with a spike; at ``number`` 0 without gradloc, at -1 with nothing that fails.

    ``card``: the simulated device that all of it happens on. ``around_search``: called before a step is looked into and
    behind that.

    Returns:
        ``weights``, a hash of this rank's; ``failures`` and ``events``, how many there were.
    """
    core_ranks._PATIENCE_S = patience_s
    with ExitStack() as stack:
        if card is not None:
            stack.enter_context(memory_is(card))
        model, localizer, num_events = _train(layout, place, number, failing, mode, dtype, around_search)
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(local_shard(param).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"weights": digest.hexdigest(), "failures": localizer.num_failures, "events": num_events}


def _train(layout, place, number, failing, mode, dtype, around_search) -> tuple[torch.nn.Module, Localizer, int]:
    precision = getattr(torch, dtype)
    model = shard(build("tiny"), layout, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = Ranks()
    settings = GradLocConfig(action=ActionConfig(mode), evidence=EvidenceConfig(bundle="full"))
    localizer = Localizer(ToyTrainer(model, optimizer), ranks, settings)
    rank = dist.get_rank() if dist.is_initialized() else 0
    num_events = 0
    for seed, plants in enumerate((PLANT, {})):
        batch = _batch(seed).planted(plants)
        space = GradientSpace(model, ranks)
        step = FailingStep(model, batch, NUM_MICRO_BATCHES, precision)
        step.arm(place, number if rank in failing else -1)
        space.clear()
        policy = Policy(seed, "fixed", [batch.num_tokens], [20.0], [20.0 * batch.num_tokens**0.5], max_events=1)
        localizer.begin_update(policy if number else None, space)
        localizer.begin_mini_batch(step)
        step.train(localizer.after_backward)
        norm = clip_gradient(model, 1.0)
        if plants:
            around_search()
        localizer.before_step(norm)
        if plants:
            around_search()
        localizer.end_update()
        num_events += sum(outcome.is_written for outcome in localizer.outcomes)
        optimizer.step()
    return model, localizer, num_events


@contextmanager
def memory_is(card: Card):
    """Answer the search's questions to a device by this one."""
    card.needs, card.ways = [], []
    cheapest_plan = MemoryNeed.cheapest_plan

    def noted(need: MemoryNeed, there: Memory) -> int:
        card.needs.append(need)
        card.ways.append(cheapest_plan(need, there))
        return card.ways[-1]

    with (
        mock.patch.object(memory, "memory_of", lambda device: card.memory()),
        mock.patch.object(memory, "peak_of", lambda device: (card.peak, card.live)),
        mock.patch.object(memory, "reset_peak", lambda device: setattr(card, "peak", card.live)),
        mock.patch.object(MemoryNeed, "cheapest_plan", noted),
        card,
    ):
        yield


@cache
def _of_search(layout: str, dtype: str) -> tuple[int, int]:
    """How many allocations a whole search makes on this rank's simulated device, and what it needs, in bytes."""
    card, counts = Card(), []
    train(layout, number=-1, dtype=dtype, card=card, around_search=lambda: counts.append(card.num_allocations))
    return counts[1] - counts[0], card.needs[0].peak_bytes(PLANS[0])


def train_on_card(
    layout: str, failing: int, at: float = 1.0, room: float | None = None, dtype: str = "float32", mode: str = "observe"
) -> dict[str, Any]:
    """:func:`train` on simulated devices, of which one runs out of memory in the search.

    Args:
        layout: of the model.
        failing: that rank.
        at: behind which of the search's allocations the device gives no more: 0 the first, 1 none.
        room: what that device has beside what training holds when the search begins, in multiples of what the search
            needs where everything stays on the device; None: enough.
        dtype: what the model computes in.
        mode: the action's.

    Returns:
        As :func:`train`; ``plain``, the weights without gradloc, ``errors`` of this rank's device, and the ``way`` that
        it would have searched.
    """
    num_allocations, need = _of_search(layout, dtype)
    plain, card = train(layout, mode=mode, dtype=dtype), Card()
    began: list[int] = []

    def around_search() -> None:
        began.append(card.num_allocations)
        is_over = len(began) % 2 == 0
        if is_over:
            card.capacity = math.inf
        elif is_failing and room is not None:
            card.capacity = card.reserved + max(room * need - (card.reserved - card.live), 0)

    def on_allocation() -> None:
        if len(began) % 2 and card.num_allocations - began[-1] > at * num_allocations:
            card.fill()

    is_failing = dist.get_rank() == failing
    if is_failing and room is None:
        card.on_allocation = on_allocation
    answer = train(layout, number=-1, mode=mode, dtype=dtype, card=card, around_search=around_search)
    way = card.ways[0]
    return answer | {"plain": plain["weights"], "errors": card.num_errors, "way": way}


def fail_apart(patience_s: float = 1.0) -> str:
    """Both ranks fail, the first with a collective open that the second has not issued; the error's type."""
    core_ranks._PATIENCE_S = patience_s
    ranks, work = Ranks(), []

    def joint():
        if ranks.is_first:
            work.append(dist.all_reduce(torch.ones(1), async_op=True))
        raise Injected

    try:
        ranks.run_collective(joint)
    except RuntimeError as error:
        if not work:  # close what is open, so that the world can go on
            dist.all_reduce(torch.ones(1))
        return type(error).__name__


def train_past_every_pass(
    layout: str, place: str, failing: Sequence[int], mode: str = "observe"
) -> list[dict[str, Any]]:
    """:func:`train` without gradloc, then failing in pass 1, 2, ... until the search has no more."""
    answers = [train(layout)]
    while len(answers) == 1 or answers[-1]["failures"]:
        answers.append(train(layout, place, len(answers), failing, mode=mode))
    return answers
