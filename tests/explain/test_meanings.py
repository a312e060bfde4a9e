# SPDX-License-Identifier: Apache-2.0
"""Every cause that a record can have is explained, with what people do about it; an advantage also by its group."""

import math
import re
from typing import Any

import pytest
import torch

from gradloc.explain.causes import CAUSE_INFO, cause_info, classify
from gradloc.explain.culprits import group_sentence, repeat_sentence
from gradloc.record import CAUSES, BatchStatistics, Cause, Event, Run, Sibling
from tests.explain import a_culprit


def test_every_cause_has_a_meaning_and_a_config_line_for_every_trainer_and_a_newer_one_is_unknown():
    for label in CAUSES:
        found = cause_info(label)
        assert found is CAUSE_INFO[label] and found.title and found.means.endswith("."), label
        assert all(found.advice(trainer) for trainer in ("verl 0.7.0", "verl 0.9.1", None)), label
    assert cause_info("from the future") is CAUSE_INFO["unknown"]


def in_group(advantage: float, others: tuple[float, ...], rewards: tuple[float, ...] | None = None, **run: Any) -> str:
    """What is said of a culprit with this advantage, among siblings with these, by 4 responses of GRPO."""
    made_by = Run(**{"trainer": "verl 0.9.1", "estimator": "grpo", "rollouts": 4, **run})
    own, *theirs = rewards or (1.0, *(0.25 * number for number, _ in enumerate(others)))
    siblings = tuple(Sibling(reward=reward, advantage=a) for reward, a in zip(theirs, others, strict=True))
    culprit = a_culprit(advantage=advantage, reward=own, siblings=siblings, coefficient=-0.01)
    cause = classify(culprit, BatchStatistics(advantage=0.1), (), made_by)
    return group_sentence(Event(run=made_by, culprits=(a_culprit(culprit, cause=cause),)))


HALF = (-0.5, -0.5, -0.5)
ONE = (8.0, 0.0, 0.0, 0.0)
TRL = {"rollouts": 8, "trainer": "trl 1.16.0"}


@pytest.mark.parametrize(
    ("advantage", "others", "rewards", "run", "numbers"),
    [
        (1.52, HALF, None, {}, "1.5 4"),
        (-9.0, HALF, None, {}, "1.5 4"),
        (math.nan, HALF, None, {}, None),
        (1.4, (0.4, 0.9, 0.1), None, {}, "0.7 0"),  # the group's mean
        (1.4, (-0.6, -0.4, -0.1), None, {}, None),  # as weights on unlikely tokens leave it
        (0.9, HALF, (0.3,) * 4, {}, "0.3 0"),  # all rewards alike
        (0.9, (-0.3,) * 3, (0.3, 0.3, 0.3, 0.300001), {}, None),
        (1.0, (), None, {}, "4"),  # no other response in the batch
        (1.0, (), None, {"rollouts": 1}, ""),
        (9.0, HALF, (9.0, 1.0, 0.0, 0.0), {}, "1.5 4"),
        (6.1, (-6.1 / 3,) * 3, ONE, {"estimator": "grpo_mean"}, "6 4"),
        (8.1, (-2.7,) * 3, ONE, {"estimator": "rloo"}, "8 4"),
        *((1e4, (-1e4 / 3,) * 3, ONE, {"estimator": name}, None) for name in ("gae", None)),
        *((2.4, (-0.8,) * 3, ONE, run, None) for run in (TRL, {"rollouts": 8})),
        *((2.6, (-2.6 / 3,) * 3, ONE, run, "2.47 8") for run in (TRL, {"rollouts": 8})),
        (1.4, (), (0.3,), TRL, None),  # a group of which a step has a part is not judged
        (1.4, (0.4, 0.9, 0.1), None, TRL, None),
    ],
)
def test_an_advantage_is_held_against_what_its_estimator_gives_for_its_group(advantage, others, rewards, run, numbers):
    said = in_group(advantage, others, rewards, **run)
    assert bool(said) == (numbers is not None)
    assert " ".join(re.findall(r"\d+(?:\.\d+)?", said)) == (numbers or "")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_bounds_are_reached_by_the_reward_that_is_unlike_all_others(size):
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[0] = 8.0
    centred = rewards - rewards.mean()
    reached = {"grpo": centred / rewards.std(), "grpo_mean": centred, "rloo": centred * size / (size - 1)}
    for estimator, advantages in reached.items():
        for factor, is_said in ((1.0, False), (1.02, True)):
            first, *others = (factor * advantages).tolist()
            given = {"estimator": estimator, "rollouts": size}
            assert ("at most" in in_group(first, tuple(others), tuple(rewards.tolist()), **given)) == is_said


@pytest.mark.parametrize(("count", "is_said"), [(None, False), (1, False), (2, True)])
def test_a_token_that_ends_turns_again_is_told_from_the_second_event_on(count, is_said):
    found = repeat_sentence(a_culprit(cause=Cause("not_sampled", {"events_ended": count} if count else {})))
    assert (str(count) in found, bool(found)) == (is_said, is_said)
