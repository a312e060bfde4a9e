# SPDX-License-Identifier: Apache-2.0
"""A loop of Megatron's own in its other shapes, and what is refused; the rest is in test_ranks.py."""

from typing import Any

import pytest
import torch

from tests.recipes.test_ranks import are_same, check_named
from tests.world.events import events_in

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"is_tied": True},
    "per token": {"more": {"calculate_per_token_loss": True}},
    "logits": {"is_loss_outside": True},
    "slime's": {"is_loss_outside": True, "is_packed": True, "asks_norm": True, "dtype": "bfloat16"},
    "recomputed": {"more": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    "not clipped": {"clip_grad": 0.0},
    "a group of its own norm": {"more": {"mtp_group": "output_layer"}},
    "reduced meanwhile": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 10_000}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "overlap_param_gather=True": {
        "is_distributed": True,
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "hidden_dropout=0.1": {"more": {"hidden_dropout": 0.1}},
    "tensor parallelism": {"tensor": 2},
    "an optimizer other than Megatron's own": {"has_optimizer": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_of_another_shape(train, tmp_path, shape):
    given = SHAPES[shape]
    assert are_same(train(**given), train(folder=str(tmp_path / "observe"), **given))
    masked, without = train(folder=str(tmp_path), action="mask", **given), train(is_planted=False, **given)
    assert are_same(masked, without)
    check_named(tmp_path / "observe", train(**given))


def test_a_clip_is_the_one_of_megatrons_step(train):
    for own, ours in train(name="clip_twice"):
        assert own and all(map(torch.equal, own, ours))


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_not_run_is_refused_in_a_sentence_and_trains_on(train, tmp_path, what):
    watched = train(folder=str(tmp_path), **REFUSED[what])
    assert [each["is_off"] for each in watched] == [3, 3] and events_in(tmp_path) == []
    assert watched[0]["said"] == [f"gradloc: gradloc does not look into Megatron with {what}. Nothing is watched"]
    assert are_same(watched, train(**REFUSED[what]))
