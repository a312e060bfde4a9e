# SPDX-License-Identifier: Apache-2.0
"""Which settings are measured, and that their norms are those of a step trained with them: on a bare model, whose loss
has settings of its own. On real trainers: tests/adapters/conformance/test_cures.py."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.step import MASK, NUM_TOKENS
from gradloc.search import cures
from gradloc.search.auto import auto
from gradloc.search.cures import Candidate, try_cures
from tests.search import NUM_MICRO_BATCHES, task_of
from tests.toy_model import Loss, ToyStep

TOKEN, KL = ({(3, 2): 1e4}, Loss(kl=0.05, entropy=0.01)), ({}, Loss(kl=500.0, entropy=0.01))
"""An advantage, or a KL term, that is far too large, and the loss."""


def tried(monkeypatch, case, *settings, max_cures=2, max_steps=100.0, max_seconds=math.inf):
    """What is said of these settings, by what they set, and the norms of steps trained with them."""
    plants, loss = case
    task, batch = task_of(plants, max_steps=max_steps, loss=loss)
    options = [Candidate(str(each), str(each), each, is_of_batch=False) for each in settings]
    monkeypatch.setattr(cures, "candidates", lambda step, ranks, groups: options)
    result = auto(task)
    task.limit.seconds = max_seconds
    found = try_cures(task, result, None, max_cures)
    truths = {}
    for each in settings:
        if hasattr(loss, next(iter(each))):
            step = ToyStep(task.prober.step.model, batch, NUM_MICRO_BATCHES, loss=replace(loss, **each))
            space = GradientSpace(step.model)
            space.clear()
            step.train()
            truths[str(each)] = space.norm()
    return task, found, truths


def test_a_setting_that_heals_is_measured_and_the_others_cost_nothing(monkeypatch):
    none, less, same = {"kl": 0.0}, {"kl": 400.0}, {"clip": 0.2}
    task, found, truths = tried(monkeypatch, KL, less, same, none, {"entropy": 0.0})
    assert [cured.verdict for cured in found] == ["healed", "not_healed", "not_healed", "no_change"]
    healed, *others = found
    assert healed.name == str(none) and healed.norm_after == pytest.approx(truths[str(none)], rel=1e-5)
    assert healed.forwards == healed.backwards == NUM_MICRO_BATCHES and 0 < healed.kept < 1
    assert healed.changed_tokens == pytest.approx(1, abs=0.05)
    for cured in others:
        assert not cured.forwards and cured.norm_after <= truths[cured.name] * (1 + 1e-5), "at least"
    assert others[-1].norm_after == task.spike.grad_norm == pytest.approx(truths[str(same)], rel=1e-6)


def test_what_cannot_come_under_the_threshold_is_not_measured(monkeypatch):
    _, found, truths = tried(monkeypatch, TOKEN, {"kl": 0.0}, {"entropy": 0.0})
    for cured in found:
        assert (cured.verdict, cured.forwards, cured.error_bound) == ("not_healed", 0, None)
        assert 0.99 * truths[cured.name] < cured.norm_after <= truths[cured.name]


def test_a_setting_that_the_loss_fails_under_is_left_out(monkeypatch):
    _, found, _ = tried(monkeypatch, KL, {"unknown": 1.0}, {"kl": 0.0})
    assert [cured.name for cured in found] == [str({"kl": 0.0})]


@pytest.mark.parametrize(("max_cures", "max_steps", "num"), [(1, 100.0, 1), (2, 100.0, 1), (2, 0.5, 0)])
def test_no_more_are_measured_than_may_be_and_the_first_that_heals_ends_it(monkeypatch, max_cures, max_steps, num):
    given = {"max_cures": max_cures, "max_steps": max_steps}
    _, found, _ = tried(monkeypatch, KL, {"kl": 0.0}, {"kl": 0.01}, {"kl": 0.02}, **given)
    assert sum(cured.forwards > 0 for cured in found) == num == len(found)


def test_when_time_is_up_one_setting_is_still_measured_and_no_second(monkeypatch):
    monkeypatch.setattr(cures, "verdict_of", lambda *_: ("not_explained", ""))
    _, found, _ = tried(monkeypatch, KL, {"kl": 0.0}, {"kl": 0.01}, max_seconds=1e-9)
    assert [cured.verdict for cured in found if cured.forwards] == ["not_healed"]
    _, found, _ = tried(monkeypatch, KL, {"kl": 0.0}, {"kl": 0.01})
    assert [cured.verdict for cured in found if cured.forwards] == ["not_healed"] * 2, "with time, as many as may be"


def test_where_nothing_spiked_or_there_is_nothing_to_try_none_is(monkeypatch):
    task, _ = task_of({(3, 2): 1e4})
    assert try_cures(task, auto(task), None, 2) is None, "the bare step has no lines"
    monkeypatch.setattr(cures, "candidates", lambda step, groups: [Candidate("a", "a", {"kl": 1.0}, False)])
    rehearsed = replace(task, spike=replace(task.spike, kind="forced", threshold=None))
    assert try_cures(rehearsed, auto(task), None, 2) is None


class Asked:
    """A step that says which settings would change its loss, and which rows some leave."""

    has_own_loss, trainer_name, num_micro_batches = True, "verl 0.9", 2
    left = {"veto": torch.tensor([True, True, False]), "drop_sequences": torch.zeros(3, dtype=torch.bool)}

    def __init__(self, is_value=False):
        self.is_value = is_value

    def recorded(self, micro_batch):
        return SimpleNamespace(is_value=self.is_value)

    def would_change(self, settings):
        return "clip_ratio_c" in settings

    def tensors_under(self, name, micro_batch, groups):
        return {MASK: self.left[name]} if name in self.left else {} if name == "truncate" else None

    def recorded_under(self, micro_batch, settings, tensors=None):
        return micro_batch, dict(settings), tensors


def test_tried_is_what_would_change_the_loss_and_leaves_tokens_in_it():
    found = cures.candidates(Asked(), Ranks())
    assert [(each.name, each.is_of_batch) for each in found] == [
        ("dual_clip", False),
        ("truncate", True),
        ("veto", True),
    ]
    assert [each.num_tokens for each in found] == [0, 0, 4], "of two micro-batches"
    refused = SimpleNamespace(refused_cures=("veto", "truncate"))
    assert [each.name for each in cures.candidates(Asked(), Ranks(), refused)] == ["dual_clip"]
    refused = SimpleNamespace(refused_cures=("veto", "drop_sequences"))
    assert [each.num_tokens for each in cures.candidates(Asked(), Ranks(), refused)] == [0, 0], "none takes any out"
    assert not cures.candidates(Asked(is_value=True), Ranks()), "of a critic's settings none is asked for"
    for name, value in (("trainer_name", ""), ("has_own_loss", False)):
        step = Asked()
        setattr(step, name, value)
        assert cures.candidates(step, Ranks()) == []


def test_a_setting_s_records_are_the_loss_s_own_under_it_with_as_many_tokens_as_it_leaves():
    step, ranks = Asked(), Ranks()
    (first, second) = cures.records_under(step, ranks, "dual_clip", None).items()
    assert [first[0], second[0]] == [0, 1] == [first[1][0], second[1][0]]
    assert "clip_ratio_c" in first[1][1] and first[1][2] is None
    assert cures.records_under(step, ranks, "truncate", None) == {0: (0, {}, {}), 1: (1, {}, {})}
    _, settings, tensors = cures.records_under(step, ranks, "veto", None)[1]
    assert settings == {} and tensors[MASK] is step.left["veto"] and tensors[NUM_TOKENS].item() == 4.0
