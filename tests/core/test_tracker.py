# SPDX-License-Identifier: Apache-2.0
"""Norms are noted while training as long as that costs nothing, and tell a step's parts and past."""

from unittest import mock

import pytest
import torch

from gradloc.core import tracker as tracker_module
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.tracker import NormTracker, median_size
from tests.toy_model import ToyStep, build, clip_gradient, random_batch, shard

M, LOSS_SCALE = 4, 8.0


@pytest.mark.parametrize("is_noted", [True, False])
def test_the_step_s_norms_are_read_only_where_no_backward_was_followed(is_noted, monkeypatch):
    step = ToyStep(shard(build("tiny"), "plain"), random_batch(build("tiny")), M, loss_scale=LOSS_SCALE)
    space, tracker, readings, exact = GradientSpace(step.model), NormTracker(4), 0, None
    read = space.local_squares

    def counted(*args):
        nonlocal readings
        readings += 1
        return read(*args)

    monkeypatch.setattr(space, "local_squares", counted)
    for _ in range(2):
        space.clear()
        tracker.begin_mini_batch()
        step.train((lambda: tracker.after_backward(space)) if is_noted else lambda: None)
        space.scale(1 / LOSS_SCALE)
        exact = space.squares()
        norm = float(clip_gradient(step.model, 0.1))
        tracker.after_mini_batch(space, 0.1 / (norm + 1e-6), LOSS_SCALE, is_spike=False)
    assert readings == 2 * (M if is_noted else 1)
    torch.testing.assert_close(tracker.read(space, Ranks()).history, exact.expand(2, -1), rtol=1e-4, atol=0.0)


def test_each_micro_batch_s_own_size_is_the_root_of_what_it_adds_to_the_running_square(monkeypatch):
    step = ToyStep(shard(build("tiny"), "plain"), random_batch(build("tiny")), M, loss_scale=LOSS_SCALE)
    space, tracker, running = GradientSpace(step.model), NormTracker(0), [0.0]
    assert tracker.read(space, Ranks(), LOSS_SCALE).increments is None, "nothing was noted"

    def note():
        tracker.after_backward(space)
        running.append(space.norm() / LOSS_SCALE)

    step.train(note)
    wanted = [abs(after**2 - before**2) ** 0.5 for before, after in zip(running[:-1], running[1:], strict=True)]
    assert tracker.read(space, Ranks(), LOSS_SCALE).increments == pytest.approx(wanted, rel=1e-4)
    tracker.begin_mini_batch()
    assert tracker.read(space, Ranks(), LOSS_SCALE).increments is None
    tracker.is_on = False
    tracker.after_backward(space)
    assert tracker.read(space, Ranks(), LOSS_SCALE).increments is None


def test_steps_that_spiked_are_not_remembered_and_two_are_needed():
    step = ToyStep(shard(build("tiny"), "plain"), random_batch(build("tiny")), M)
    space, tracker = GradientSpace(step.model), NormTracker(2)
    step.train()
    exact = space.squares()
    for number, is_spike in enumerate((False, True, False, False)):
        assert (tracker.read(space, Ranks()).history is None) == (number < 3)
        tracker.begin_update()
        tracker.after_mini_batch(space, 0.5, 1.0, is_spike)
    found = tracker.read(space, Ranks()).history
    torch.testing.assert_close(found, (exact / 0.25).expand(2, -1), rtol=1e-4, atol=0.0)
    assert NormTracker(0).read(space, Ranks()).history is None


def test_a_median_size_is_of_what_is_neither_zero_nor_unknown():
    assert median_size([torch.tensor([-3.0, 0.0, torch.nan]), torch.tensor([[torch.inf, 1.0], [0.0, 2.0]])]) == 2.0
    assert median_size([torch.zeros(3)]) == 0.0


class Event:
    """A device's, whose clock goes by what is launched: 10 ms each; the device is done when somebody waits."""

    clock, is_done = 0, True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def query(self):
        return Event.is_done

    def elapsed_time(self, end):
        return 10.0 * (end.at - self.at)


def test_what_takes_too_long_is_read_less_often_and_said_once(monkeypatch, caplog):
    step = ToyStep(shard(build("tiny"), "plain"), random_batch(build("tiny")), M)
    space, tracker, counts = GradientSpace(step.model), NormTracker(8), []
    reading = mock.patch.object(space, "local_squares", side_effect=space.local_squares)
    monkeypatch.setattr(tracker_module, "_event_of", lambda device: Event)
    monkeypatch.setattr(Event, "is_done", True)
    for _ in range(30):
        with reading as read:
            tracker.begin_update()
            tracker.begin_mini_batch()
            step.train(lambda: tracker.after_backward(space))
            tracker.after_mini_batch(space, 1.0, 1.0, is_spike=False)
            tracker.end_update()
        counts.append(read.call_count)
    while_judged = [counts[:3], counts[3:6], counts[6:12], counts[12:24], counts[24:]]
    assert while_judged == [[M] * 3, [1] * 3, [0, 1] * 3, [0, 0, 0, 1] * 3, [0] * 6]
    assert caplog.text.count("gradloc:") == 1
    assert len(tracker.read(space, Ranks()).history) >= 2


@pytest.mark.full
@pytest.mark.parametrize(("windows", "periods", "kept"), [((5, 3), (1, 1), [2, 3, 4]), ((5, 5), (1, 2), [1, 3])])
def test_ranks_that_remember_different_steps_share_the_last_that_all_do(windows, periods, kept, bare_world):
    for history, exact in bare_world.run(
        "tests.toy_model.scenarios.history_of_ranks", windows=windows, periods=periods
    ):
        torch.testing.assert_close(torch.tensor(history), torch.tensor([exact[n] for n in kept]), rtol=1e-4, atol=1e-12)
