# SPDX-License-Identifier: Apache-2.0
"""The advice's config lines on verl 0.9: each composes, builds and is read; those of 0.7 that are not do not pass."""

import pytest


def test_every_line_for_0_9_composes_builds_and_is_read(single):
    assert single.run("tests.explain.composed.main", verl="0.9") == [{}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("actor_rollout_ref.actor.grad_clip=0.5", "nobody reads grad_clip"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", "rollout_token_veto_threshold"),
        ("actor_rollout_ref.actor.ppo_epochs=1", "changes nothing"),
    ],
)
def test_a_line_that_does_nothing_there_is_seen(single, line, why):
    assert all(why in " ".join(found) for found in single.run("tests.explain.composed.problems", line=line, verl="0.9"))
