# SPDX-License-Identifier: Apache-2.0
"""How metrics of several updates of one step are joined."""

import math

import pytest
import torch

from gradloc.loop.metrics import is_ours, joined
from gradloc.reweighting.stages import Lopti, Stage


@pytest.mark.parametrize("whose", ["gradloc/", "gradloc/critic_"])
def test_counts_add_up_and_norms_are_the_largest(whose):
    first = {f"{whose}spikes": 1, f"{whose}unwritten": 2, f"{whose}norm_after": 0.5, f"{whose}failures": 1}
    second = {f"{whose}spikes": 4, f"{whose}unwritten": 3, f"{whose}norm_after": math.nan, f"{whose}failures": 1}
    found = joined([first, second])
    assert (found[f"{whose}spikes"], found[f"{whose}unwritten"], found[f"{whose}failures"]) == (5, 5, 1)
    assert math.isnan(found[f"{whose}norm_after"]), "what is not finite is the largest"


@pytest.mark.parametrize("order", [1, -1])
def test_what_belongs_together_is_of_the_update_nearest_its_threshold(order):
    near = {"gradloc/threshold": 8.0, "gradloc/norm_over_threshold": 2.0, "gradloc/healthy_norm": 0.1}
    far = {"gradloc/threshold": 2.0, "gradloc/norm_over_threshold": 0.5}
    assert joined([near, far][::order]) == near


def test_the_stages_of_lopti_are_joined_so_too():
    stages = [Stage("low", torch.ones(1, 2, dtype=torch.bool)), Stage("high", torch.ones(1, 2, dtype=torch.bool))]
    names = ("gradloc/unwritten", "gradloc/threshold", "gradloc/norm_over_threshold", "actor/pg_loss")
    outputs = [
        {name: [value] for name, value in zip(names, of, strict=True)} for of in ((2, 3, 0.5, 1.0), (3, 9, 2, 0.5))
    ]
    merged = Lopti._merged(None, stages, stages, outputs)
    assert (merged["gradloc/unwritten"], merged["gradloc/threshold"]) == ([5], [9.0])
    assert merged["gradloc/norm_over_threshold"] == [2.0] and merged["actor/pg_loss"] == [1.5]
    assert not is_ours("actor/pg_loss")
