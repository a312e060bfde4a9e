# SPDX-License-Identifier: Apache-2.0
"""The localizer on a bare model: what it leaves alone, what it takes away, and what it does when something fails."""

import math
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from gradloc.config import ActionConfig, GradLocConfig, SearchConfig
from gradloc.core.gradients import GradientSpace
from gradloc.core.memory_plans import PLANS, MemoryNeed
from gradloc.core.ranks import Ranks
from gradloc.loop import localizer as loop_localizer
from gradloc.loop.localizer import Localizer
from gradloc.loop.messages import Policy
from tests.toy_model import ToyStep, ToyTrainer, build, clip_gradient, random_batch, shard

MODULE = "gradloc.loop.localizer"
NUM_MICRO_BATCHES = 4
PLANT = {(3, 2): 1e4}


def policy(num_tokens: int, threshold: float | None = 20.0, **changes) -> Policy:
    tau = None if threshold is None else threshold * num_tokens**0.5
    return Policy(**{"global_step": 7, "kind": "fixed", "num_tokens": [num_tokens], "thresholds": [threshold]}
                      | {"tau": [tau], "max_events": 3} | changes)  # fmt: skip


class Run:
    """One model, its localizer, and an update of one optimizer step at a time."""

    def __init__(self, mode: str = "observe", scales_loss: bool = False, **limits):
        self.model = shard(build("tiny"), "plain")
        self.space = GradientSpace(self.model)
        trainer = ToyTrainer(self.model, torch.optim.AdamW(self.model.parameters()))
        trainer.scales_loss = scales_loss
        settings = GradLocConfig(search=SearchConfig(layer_window=0), action=ActionConfig(mode, **limits))
        self.localizer = Localizer(trainer, Ranks(), settings)

    def step(self, plants: dict, the_policy: Policy | None = None, is_watched: bool = True) -> float:
        """Train on a planted batch; returns the norm of what the step would take."""
        batch = random_batch(self.model).planted(plants)
        step = ToyStep(self.model, batch, NUM_MICRO_BATCHES)
        self.space.clear()
        if not is_watched:
            step.train()
            return float(clip_gradient(self.model, 1.0))
        self.localizer.begin_update(the_policy or policy(batch.num_tokens), self.space)
        norm = self.mini_batch(step)
        self.localizer.end_update()
        return norm

    def mini_batch(self, step: ToyStep, norm: float | None = None, late: Policy | None = None) -> float:
        """One optimizer step within an update, up to what it would take; of this norm, where one is given."""
        self.space.clear()
        self.localizer.begin_mini_batch(step)
        step.train(self.localizer.after_backward)
        clipped = clip_gradient(self.model, 1.0) if norm is None else torch.tensor(norm)
        return float(self.localizer.before_step(clipped, late))

    def gradient(self) -> list[torch.Tensor | None]:
        return [None if grad is None else grad.clone() for grad in self.space.current()]


def same(left: list, right: list) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("mode", ["skip", "abort"])
def test_a_step_that_is_not_taken_leaves_no_gradient(mode):
    run = Run(mode)
    assert run.step(PLANT) == 0.0
    assert all(grad is None for grad in run.gradient())


@pytest.mark.parametrize("takes", [False, True])
def test_the_record_says_whether_the_optimizer_took_what_is_not_finite(takes):
    run = Run()
    run.localizer.trainer.takes_what_is_not_finite = takes
    run.step({(3, 2): math.nan})
    (event,) = run.localizer.events
    found = event.event.consequence
    assert found.is_taken is takes and found.clip_scale is None and found.grad_clip == 1.0


def test_a_policy_may_come_as_late_as_the_step():
    run = Run("skip")
    batch = random_batch(run.model).planted(PLANT)
    run.localizer.begin_update(None, run.space)
    norm = run.mini_batch(ToyStep(run.model, batch, NUM_MICRO_BATCHES), late=policy(batch.num_tokens))
    assert norm == 0.0 and len(run.localizer.events) == 1 and run.localizer.coefficient > 0


def test_more_culprits_than_may_be_masked_skip_the_step():
    run = Run("mask", max_masked_tokens=1)
    run.step({(3, 2): 1e4, (9, 1): 1e4})
    (event,) = run.localizer.events
    assert event.event.action.taken == "skip" and "2 tokens would be masked" in event.event.action.reason


def test_without_a_spike_or_a_policy_nothing_is_looked_into_and_a_rehearsal_is():
    run = Run()
    run.step({})
    batch = random_batch(run.model)
    run.localizer.begin_update(None, run.space)
    assert run.mini_batch(ToyStep(run.model, batch, NUM_MICRO_BATCHES), norm=1e9) == 1e9
    assert run.localizer.events == []
    run.step({}, policy(batch.num_tokens, force=True))
    (event,) = run.localizer.events
    assert event.event.trigger.kind == "forced" and event.event.action.taken == "observe"


def train(run: Run, plants: dict, num_epochs: int = 3, is_watched: bool = True, **policy_changes) -> torch.Tensor:
    """Epochs of four mini-batches of four rows, each a step of the optimizer's; returns all weights after them."""
    batch = random_batch(run.model).planted(plants)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-4)
    parts = [batch.part(slice(first, first + 4), torch.device("cpu")) for first in range(0, 16, 4)]
    if is_watched:
        num_tokens = [part.num_tokens for part in parts]
        rule = {"thresholds": [20.0] * 4, "tau": [20.0 * n**0.5 for n in num_tokens]}
        changed = replace(policy(num_tokens[0], **policy_changes), num_tokens=num_tokens, **rule)
        run.localizer.begin_update(changed, run.space)
    for _ in range(num_epochs):
        for part in parts:
            step = ToyStep(run.model, part, 2)
            if is_watched:
                run.mini_batch(step)
            else:
                run.space.clear()
                step.train()
                clip_gradient(run.model, 1.0)
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in run.model.parameters()])


def outcomes(run: Run) -> list[tuple[int, str, bool]]:
    return [(spike.number, spike.taken, spike.is_written) for spike in run.localizer.outcomes]


def test_every_appearance_of_a_culprit_is_masked_however_few_events_may_be_written():
    masked, without, plain = Run("mask"), Run(), Run()
    weights = train(masked, PLANT, max_events=1)
    assert torch.equal(weights, train(without, {(3, 2): 0.0}, is_watched=False)), "bit for bit"
    assert not torch.equal(weights, train(plain, PLANT, is_watched=False))
    assert outcomes(masked) == [(0, "mask", True), (4, "mask", False), (8, "mask", False)]
    assert len(masked.localizer.events) == 1 and len(masked.localizer.norms) == 12
    assert all(spike.grad_norm > 20.0 for spike in masked.localizer.outcomes), "as they were before the action"


@pytest.mark.parametrize("mode", ["skip", "abort"])
def test_a_spike_that_no_event_is_written_of_is_not_trained_on_either_and_needs_no_search(mode, monkeypatch):
    run, search = Run(mode), Mock(wraps=loop_localizer.localize)
    monkeypatch.setattr(loop_localizer, "localize", search)
    train(run, PLANT, max_events=1)
    assert outcomes(run) == [(0, mode, True), (4, mode, False), (8, mode, False)]
    search.assert_called_once()


def test_where_the_number_of_searches_is_limited_masking_falls_back_to_skipping():
    run = Run("mask", max_searches_per_step=2)
    train(run, PLANT, max_events=1)
    assert [taken for _, taken, _ in outcomes(run)] == ["mask", "mask", "skip"]


def test_observing_looks_no_further_than_events_are_written():
    run, plain = Run(), Run()
    assert torch.equal(train(run, PLANT, max_events=1), train(plain, PLANT, is_watched=False))
    assert [(taken, written) for _, taken, written in outcomes(run)][:2] == [("observe", True), ("observe", False)]
    assert [raw.event.step.epoch for raw in run.localizer.events] == [0]


def test_a_scaled_loss_that_overflows_is_no_spike_and_a_nan_in_it_is():
    run = Run(scales_loss=True)
    batch = random_batch(run.model)
    for plants, num_events in (({}, 0), ({(3, 2): float("nan")}, 1)):
        run.localizer.begin_update(policy(batch.num_tokens), run.space)
        run.mini_batch(ToyStep(run.model, batch.planted(plants), NUM_MICRO_BATCHES, loss_scale=8.0), norm=math.inf)
        assert len(run.localizer.events) == num_events


def test_a_failure_leaves_the_step_as_it_was_and_after_three_nobody_looks_again(caplog, monkeypatch):
    search = Mock(side_effect=RuntimeError("made to fail"))
    monkeypatch.setattr(loop_localizer, "localize", search)
    run, plain = Run("mask"), Run()
    for number in range(4):
        torch.manual_seed(number)
        norm = run.step(PLANT)
        torch.manual_seed(number)
        assert plain.step(PLANT, is_watched=False) == norm
        assert same(run.gradient(), plain.gradient())
    assert search.call_count == run.localizer.num_failures == 3 and run.localizer.events == []
    assert "failure 3 of 3" in caplog.text and "made to fail" in caplog.text


def test_a_long_search_says_every_half_minute_that_it_goes_on(caplog, monkeypatch):
    search, before = loop_localizer.localize, {*threading.enumerate()}

    def slow(*given, **named):
        assert [thread.daemon for thread in {*threading.enumerate()} - before] == [True], "it holds up no end"
        time.sleep(0.2)
        return search(*given, **named)

    monkeypatch.setattr(loop_localizer, "localize", slow)
    monkeypatch.setattr(loop_localizer, "_HEARTBEAT_S", 0.05)
    Run().step(PLANT)
    assert "searching step 7, for 0 s so far; training waits" in caplog.text
    num_lines = len(caplog.records)
    time.sleep(0.2)
    assert len(caplog.records) == num_lines, "and no longer when it is over"


@pytest.mark.parametrize("place", ["gradloc.core.gradients.GradientSpace.local_squares", f"{MODULE}.median_size"])
def test_no_memory_for_what_is_only_noted_ends_nothing(caplog, monkeypatch, place):
    plain, run = Run(), Run()
    norm = plain.step({}, is_watched=False)
    monkeypatch.setattr(place, Mock(side_effect=torch.OutOfMemoryError("no room")))
    assert run.step({}) == norm and same(run.gradient(), plain.gradient())
    run.localizer.report()
    assert run.localizer.num_failures == 0 and "no memory to" in caplog.text


def test_an_optimizer_s_state_that_does_not_come_back_ends_the_process(monkeypatch, caplog):
    full = torch.OutOfMemoryError("no room for the state")
    monkeypatch.setattr(loop_localizer.SearchMemory, "close", Mock(side_effect=full))
    monkeypatch.setattr(loop_localizer.os, "_exit", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        Run().step(PLANT)
    assert "does not fit back onto the device" in caplog.text and "it ends now" in caplog.text


@pytest.mark.parametrize("number", range(len(PLANS) + 1))
@pytest.mark.parametrize("mode", ["observe", "mask"])
def test_where_memory_is_short_room_is_made_or_the_spike_bisected_or_left_alone(monkeypatch, caplog, mode, number):
    run, plain = Run(mode), Run(mode)
    for each in (run, plain):
        each.step({})
        each.localizer.trainer.optimizer.step()
    held = run.localizer.trainer.optimizer.state
    state = {id(value): (value, value.clone()) for each in held.values() for value in each.values()}
    sizes = []
    monkeypatch.setattr(MemoryNeed, "cheapest_plan", lambda need, memory: number)
    search = loop_localizer.localize

    def watched(*given, **named):
        sizes.append(sum(value.untyped_storage().nbytes() for value, _ in state.values() if value.dim()))
        return search(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(loop_localizer, "localize", watched)
        norm = run.step(PLANT)
    for value, before in state.values():
        assert torch.equal(value, before), "the optimizer's state is back"
    assert [id(value) for each in held.values() for value in each.values()] == list(state)
    assert run.space.room is None and not run.space.keeps_on_host and run.localizer.num_failures == 0
    if number == len(PLANS):
        assert "make micro-batches smaller" in caplog.text and run.localizer.events == [] and not sizes
        assert norm == plain.step(PLANT, is_watched=False) and same(run.gradient(), plain.gradient())
        return
    assert norm == plain.step(PLANT) and same(run.gradient(), plain.gradient())
    ((found,), (wanted,)) = ([raw.event for raw in each.localizer.events] for each in (run, plain))
    assert found.search.strategy == ("auto" if PLANS[number].is_full else "bisect")
    assert [each.positions for each in found.culprits] == [each.positions for each in wanted.culprits]
    assert found.action.taken == wanted.action.taken
    if PLANS[number].is_full:
        assert found.certificate == wanted.certificate
    assert (sizes == [0]) == PLANS[number].moves_optimizer, "its memory is free while the search runs"


def test_replicas_that_sum_no_gradients_switch_it_off_at_once(caplog):
    run, plain = Run("mask"), Run()
    run.space.are_summed = False
    assert run.step(PLANT) == plain.step(PLANT, is_watched=False) and run.localizer.events == []
    assert "each trains a model of its own. gradloc is off" in caplog.text
    caplog.clear()
    run.step({})
    assert "a model of its own" not in caplog.text, "said once"


@pytest.mark.parametrize(("parted", "said"), [(["a.weight"], "1 parameter, a.weight"), (["a", "b"], "2 parameters")])
def test_replicas_that_have_parted_are_told_of_once_a_step_was_taken(monkeypatch, caplog, parted, said):
    monkeypatch.setattr(loop_localizer, "diverged_params", lambda space, ranks: parted)
    run, told = Run(), []
    run.space.num_replicas = 2
    for _ in range(3):
        run.step({})
        told.append([message for message in caplog.messages if "replicas" in message])
        caplog.clear()
    assert told[0] == told[2] == [] and f"replicas hold other weights in {said}" in told[1][0]


def test_the_report_has_what_the_first_process_alone_knows_and_the_norms_before_clipping():
    run = Run("mask")
    run.step(PLANT)
    report = run.localizer.report(learned={"x": 1})
    assert report.process == 0 and report.learned == {"x": 1} and report.num_failures == 0
    assert len(report.norms) == len(report.head_squares) == 1 and report.norms[0] > 20.0
    assert 0 < report.head_squares[0] < report.norms[0] ** 2
    assert [spike.taken for spike in report.outcomes] == ["mask"] and len(report.events) == 1
    run.step({})
    assert run.localizer.report().outcomes == run.localizer.report().events == (), "of the last update alone"
