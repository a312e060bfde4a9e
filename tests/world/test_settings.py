# SPDX-License-Identifier: Apache-2.0
"""A case that asks for what a trainer does not have is skipped, and no other."""

import pytest

from tests.world.settings import Given, Unsupported

ACTOR = "actor_rollout_ref.actor"
NAMES = {"grad_clip": "max_grad_norm", "loss_agg_mode": ("loss_type", {"token-mean": "dapo"})}


def test_an_adapter_takes_what_its_trainer_has():
    ours = (f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640", f"{ACTOR}.gradloc.action.mode=mask")
    given = Given([*ours, f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.loss_agg_mode=token-mean", "beta='1e4'", "lora"])
    assert given.take_gradloc() == {"trigger": {"tau": 640}, "action": {"mode": "mask"}}
    assert given.take(NAMES) == {"max_grad_norm": 0.5, "loss_type": "dapo"}
    assert given.take_own({"beta"}) == {"beta": 1e4}
    given.end()


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
