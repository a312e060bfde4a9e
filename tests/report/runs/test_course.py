# SPDX-License-Identifier: Apache-2.0
"""A loss in which nothing was found is described by what it did."""

import random

import pytest

from gradloc.report.runs.course import best_level, course, past_its_best, reward_course


def noisy(*levels, seed=0, noise=0.05):
    """Steps from 1 on, and values around the levels, each by a share of it."""
    rng = random.Random(seed)
    return [(at, level * (1 + noise * rng.uniform(-1, 1))) for at, level in enumerate(levels, 1)]


FALLING = [4.0 * 0.97**at + 1 for at in range(120)]
JUMP = [*FALLING[:80], FALLING[80] * 4, *FALLING[81:]]
RISES = [*(4 * 0.9**at + 2.2 for at in range(90)), *(min(2.2 + 0.01 * at, 2.5) for at in range(90))]
STUCK = [(at, 0.693) for at in range(21, 41)]
HIGH = [9.0, 5.0, 5.1, 4.8, 12.0, 5.0, 4.9, 5.2, 5.0, 4.8, 5.1, 5.0]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (noisy(*FALLING), ", and none of its 120 values is twice those around it."),
        (noisy(*[2.3] * 40, noise=0.001), ", and hardly moved: all its 40 values are about 2.3."),
        ([*noisy(*FALLING[:20]), *STUCK], ", and is 0.693 in each of its last 20 values."),
        (noisy(*[2.3] * 40, noise=0.03), ", and did not fall: its median is"),
        (noisy(*JUMP), "at step 81, 3.9 times the values before it"),
        (noisy(*JUMP), ", was back at step 82."),
        (noisy(*RISES), "; it rose from 2.2"),
        (noisy(*[9.0, 7.0, 5.0, 3.0], *[1.0] * 200, noise=0.6), ", and has been level since about step"),
        ([*noisy(*FALLING), (121, 0.6)], ": 78 % lower, and none of its"),
        (noisy(*HIGH, noise=0.0), "; its value at step 5, 12, is 2.4 times those around it."),
    ],
    ids=[
        "falls",
        "flat",
        "stuck",
        "noisy and flat",
        "jumps",
        "and is back",
        "rises",
        "noise",
        "last is off",
        "one of few",
    ],
)
def test_a_course_is_said_by_the_first_clause_that_fits(losses, said):
    assert said in course(losses)


def test_how_far_a_loss_fell_is_no_share_below_0():
    assert course([(at, 3.0 - 0.1 * at) for at in range(60)]) == ", falling in almost every row."


def test_rewards_are_past_their_highest():
    rewards = noisy(*(0.2 + 0.01 * at for at in range(60)), *(0.8 - 0.008 * at for at in range(60)))
    turned = [(step, -reward) for step, reward in rewards]
    assert past_its_best(turned, "highest").startswith("; its highest level was 0.7")
    assert not past_its_best([(step, reward) for step, reward in turned[:60]], "highest")


def test_a_reward_s_deepest_fall_is_named_with_where_it_was_made_good():
    trough = noisy(*[10.0] * 40, *[2.0] * 40, *[12.0] * 40)
    assert "; it fell from 10" in reward_course(trough) and ", and was back at about step 8" in reward_course(trough)
    assert ", and has been level since about step" in reward_course(
        noisy(*(0.2 * at for at in range(50)), *[10.0] * 150)
    )


def test_a_level_is_left_behind_where_it_was_last_held():
    falls, rises = [5.0 - 0.05 * at for at in range(80)], [1.0 + 0.05 * at for at in range(80)]
    held = noisy(*falls, *[0.98] * 40, *[1.0] * 40, *rises, noise=0.001)
    level, step, end = best_level(held)
    assert level == pytest.approx(1.0, abs=0.1) and 120 <= step <= 160 and end > 2
