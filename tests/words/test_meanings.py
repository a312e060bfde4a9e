# SPDX-License-Identifier: Apache-2.0
"""Every cause that a record can have is explained, with what people do about it; an advantage also by its group."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradloc.record import CAUSES, BatchStatistics, Cause, Coefficients, Culprit, Event, Run, Sibling
from gradloc.words.causes import classify
from gradloc.words.meanings import MEANINGS, again, group, meaning_of


@pytest.mark.parametrize("label", CAUSES)
@pytest.mark.parametrize("trainer", ["verl 0.7.0", "verl 0.9.1", None])
def test_every_cause_has_a_meaning_and_a_config_line_for_every_trainer(label, trainer):
    found = meaning_of(label)
    assert found is MEANINGS[label]
    assert found.title and found.means.endswith(".")
    assert found.advice(trainer)


def test_an_unknown_cause_gets_what_is_said_when_nothing_stands_out():
    assert meaning_of("from the future") is MEANINGS["unknown"]


def test_more_of_a_search_is_more_of_what_limits_it():
    lines = {
        strategy: [line for _, line in MEANINGS["unknown"].advice("verl 0.7.0", strategy)]
        for strategy in ("auto", "bisect")
    }
    assert "actor_rollout_ref.actor.gradloc.search.max_steps=8" in lines["auto"]
    assert "actor_rollout_ref.actor.bisect_budget_steps=512" in lines["bisect"]


def in_group(advantage: float, others: tuple[float, ...], rewards: tuple[float, ...] | None = None, **run: Any) -> str:
    """What is said of a culprit with this advantage, among siblings with these, by 4 responses of GRPO."""
    made_by = Run(**{"trainer": "verl 0.9.1", "estimator": "grpo", "rollouts": 4, **run})
    own, *theirs = rewards or (1.0, *(0.25 * number for number, _ in enumerate(others)))
    siblings = tuple(Sibling(reward=reward, advantage=a) for reward, a in zip(theirs, others, strict=True))
    culprit = Culprit(advantage=advantage, reward=own, siblings=siblings, coefficients=Coefficients(log_prob=-0.01))
    cause = classify(culprit, BatchStatistics(advantage=0.1), (), made_by)
    return group(Event(run=made_by, culprits=(replace(culprit, cause=cause),)))


HALF = (-0.5, -0.5, -0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1.5, HALF), ""),
        ((1.52, HALF), "GRPO gives at most 1.5 with 4 responses."),
        ((-9.0, HALF), "GRPO gives at most 1.5 with 4 responses."),
        ((math.nan, HALF), ""),
        ((1.4, (0.4, 0.9, 0.1)), "The advantages of its group have a mean of 0.7, not 0."),
        ((1.4, (-0.6, -0.4, -0.1)), ""),  # as weights on unlikely tokens leave it
        ((0.9, HALF, (0.3, 0.3, 0.3, 0.3)), "All rewards of its group are 0.3, and then its advantage is 0."),
        ((0.9, (-0.3, -0.3, -0.3), (0.3, 0.3, 0.3, 0.300001)), ""),
        ((1.0, ()), "Its prompt has no other response in the batch, though 4 are drawn: nothing is subtracted"),
        ((9.0, HALF, (9.0, 1.0, 0.0, 0.0)), "GRPO gives at most 1.5 with 4 responses."),
    ],
)
def test_an_advantage_is_held_against_what_its_estimator_gives_for_its_group(given, said):
    found = in_group(*given)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("run", "advantage", "said"),
    [
        ({"estimator": "grpo_mean"}, 6.0, ""),
        ({"estimator": "grpo_mean"}, 6.1, "GRPO without the division gives at most 6 with 4 responses."),
        ({"estimator": "rloo"}, 8.0, ""),
        ({"estimator": "rloo"}, 8.1, "RLOO gives at most 8 with 4 responses."),
        ({"estimator": "gae"}, 1e4, ""),
        ({"estimator": None}, 1e4, ""),
        ({"rollouts": 8}, 2.4, ""),
        ({"rollouts": 8}, 2.6, "GRPO gives at most 2.47 with 8 responses."),
        ({"rollouts": 8, "trainer": "trl 1.16.0"}, 2.4, ""),
        ({"rollouts": 8, "trainer": "trl 1.16.0"}, 2.6, "GRPO gives at most 2.47 with 8 responses."),
    ],
)
def test_each_estimator_has_its_own_bound(run, advantage, said):
    others = (-advantage / 3,) * 3
    assert in_group(advantage, others, (8.0, 0.0, 0.0, 0.0), **run) == said


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
            assert ("gives at most" in in_group(first, tuple(others), tuple(rewards.tolist()), **given)) == is_said


def test_a_group_of_which_a_step_has_a_part_is_not_judged():
    run = {"trainer": "trl 1.16.0", "rollouts": 8}
    assert in_group(1.4, (), (0.3,), **run) == in_group(1.4, (0.4, 0.9, 0.1), **run) == ""


def test_a_prompt_of_a_single_response_is_told_as_that():
    alone = "Its prompt has no other response in the batch: nothing is subtracted from its reward."
    assert in_group(1.0, (), rollouts=1) == alone and in_group(1.0, (), rollouts=2) != alone


@pytest.mark.parametrize(("count", "said"), [(None, ""), (1, ""), (2, "In 2 events by now, the same token ends")])
def test_a_token_that_ends_turns_again_is_told_from_the_second_event_on(count, said):
    found = again(Culprit(cause=Cause("not_sampled", {"events_ended": count} if count else {})))
    assert found.startswith(said) and bool(found) == bool(said)
