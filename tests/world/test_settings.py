# SPDX-License-Identifier: Apache-2.0
"""A case that asks for what a trainer does not have is skipped, and no other."""

import pytest

from tests.world.settings import Given, Unsupported

ACTOR = "actor_rollout_ref.actor"
NAMES = {"grad_clip": "max_grad_norm", "loss_agg_mode": ("loss_type", {"token-mean": "dapo"})}


@pytest.mark.parametrize("override", ["strategy=fsdp", "loss_agg_mode=seq-mean"])
def test_what_it_does_not_have_is_refused_with_its_name(override):
    given = Given([f"{ACTOR}.{override}"])
    with pytest.raises(Unsupported, match=f"this trainer has no {override.partition('=')[0]}"):
        given.take(NAMES)
        given.end()
    Given([f"{ACTOR}.{override}"]).end([override])


def test_a_rank_that_lacks_it_skips_the_case_and_goes_on(bare_world):
    with pytest.raises(Unsupported, match="no critic"):
        bare_world.run("settings.require", has_it=False, why="it has no critic")
    assert bare_world.run("settings.require", has_it=True, why="") == [None, None]
