# SPDX-License-Identifier: Apache-2.0
"""The stabilizers on a plain module, called as an actor calls them, and what the trainer keeps of them."""

import json
import math
import statistics

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.stabilize.config import LayerClipConfig, SkipStepConfig, StabilizeConfig
from gradloc.stabilize.memory import StabilizerMemory, build_memory
from gradloc.stabilize.stabilizer import Stabilizer


@pytest.fixture
def model():
    """Two layers, named as language models' are, and a head."""
    Named, linear = torch.nn.ModuleDict, lambda: torch.nn.Linear(2, 2, bias=False)
    layers = torch.nn.ModuleList(Named({"mlp": Named({"up_proj": linear()})}) for _ in range(2))
    return Named({"model": Named({"layers": layers}), "lm_head": linear()})


def fill(model, *norms):
    """Give each layer a gradient of this norm."""
    for param, norm in zip(model.parameters(), norms, strict=True):
        param.grad = torch.full_like(param, norm / 2)


def norms_of(model):
    return [None if param.grad is None else float(param.grad.norm()) for param in model.parameters()]


def step(stabilizer, model, *norms, stage="", learned=None):
    """One update of one step; its metrics."""
    fill(model, *norms)
    stabilizer.begin_update(GradientSpace(model), stage, learned)
    norm = stabilizer.measure() if stabilizer.clips_layers else torch.tensor(math.hypot(*norms))
    assert float(stabilizer.before_step(norm)) == pytest.approx(math.hypot(*norms), nan_ok=True)
    metrics = {}
    stabilizer.end_update(metrics)
    return {name.removeprefix("gradloc/"): value for name, value in metrics.items()}


CLIPS = StabilizeConfig(layer_clip=LayerClipConfig("adagc", warmup=2, relative_factor=2.0, beta=0.5))
SKIPS = StabilizeConfig(skip_step=SkipStepConfig(True, window=4, num_deviations=2.0))


def test_a_layer_is_clipped_to_its_own_history_and_the_others_are_left(model):
    stabilizer = Stabilizer(CLIPS, grad_clip=100.0)
    assert stabilizer.clips_layers
    first = step(stabilizer, model, 3.0, 4.0, 12.0)
    assert norms_of(model) == pytest.approx([3.0, 4.0, 12.0]) and first["layer_clip/warmup"] == [1.0]
    assert step(stabilizer, model, 3.0, 4.0, 12.0)["layer_clip/warmup"] == [0.0], "the next one is clipped"
    found = step(stabilizer, model, 30.0, 4.0, 12.0)
    assert norms_of(model) == pytest.approx([6.0, 4.0, 12.0])
    assert found["layer_clip/share"] == [pytest.approx(1 / 3)]
    assert found["layer_clip/scale_min"] == [pytest.approx(0.2)]
    assert found["layer_clip/norm_after"] == [pytest.approx(14.0)] and found["layer_clip/nonfinite"] == [0]


@pytest.mark.parametrize("norms", [(math.nan, 4.0, 12.0), (0.0, 0.0, 0.0)])
def test_a_step_that_is_none_is_neither_clipped_nor_learned_from(model, norms):
    stabilizer = Stabilizer(StabilizeConfig(CLIPS.token_clip, CLIPS.seq_clip, CLIPS.layer_clip, SKIPS.skip_step), 100.0)
    step(stabilizer, model, 3.0, 4.0, 12.0)
    before = json.dumps(stabilizer.state())
    found = step(stabilizer, model, *norms)
    assert json.dumps(stabilizer.state()) == before and found["skip_step/skipped"] == [0]
    assert norms_of(model)[1:] == list(norms[1:]) and found["layer_clip/norm_after"] == [0.0]
    assert found["layer_clip/nonfinite"] == [sum(norm != norm for norm in norms)]
    assert found["layer_clip/share"] == [0.0]


def test_each_stage_learns_from_its_own_steps(model):
    stabilizer = Stabilizer(SKIPS, grad_clip=1.0)
    for norm in (1.0, 2.0, 1.0):
        step(stabilizer, model, norm, 0.0, 0.0, stage="low")
        step(stabilizer, model, 40 * norm, 0.0, 0.0, stage="high")
    state = stabilizer.state()
    assert state["low"]["skip_step"]["norms"] == [1.0, 2.0, 1.0]
    assert state["high"]["skip_step"]["norms"] == [40.0, 80.0, 40.0]
    resumed = Stabilizer(SKIPS, grad_clip=1.0)
    found = step(resumed, model, 40.0, 0.0, 0.0, stage="low", learned=json.loads(json.dumps(state)))
    assert found["skip_step/skipped"] == [1]


def apart(over: int) -> bool:
    """Return whether this rank skips a step whose threshold is between the ranks' norms: one, ``over``, is over it."""
    ranks, norms = Ranks(), [1.0, 1.5, 1.25, 1.75]
    stabilizer, only = Stabilizer(SKIPS, grad_clip=100.0, ranks=ranks), torch.nn.Linear(1, 1, bias=False)
    threshold = torch.tensor(statistics.fmean(norms) + 2.0 * statistics.stdev(norms), dtype=torch.float64)
    below = torch.nextafter(threshold, torch.zeros((), dtype=torch.float64))
    above = torch.nextafter(threshold, torch.full((), 9.0, dtype=torch.float64))
    for norm in [*map(torch.tensor, norms), above if ranks.rank == over else below]:
        stabilizer.begin_update(GradientSpace(only), "", None)
        only.weight.grad = norm.float().reshape(1, 1)
        stabilizer.before_step(norm)
        stabilizer.end_update({})
    return only.weight.grad is None


@pytest.mark.parametrize("over", [0, 1])
def test_all_ranks_skip_a_step_or_none_does(bare_world, over):
    found = bare_world.run("tests.stabilize.test_stabilizer.apart", over=over, timeout_s=60)
    assert found == [over == 0] * 2


def test_statistics_that_do_not_fit_are_said_and_left(model, caplog):
    stabilizer = Stabilizer(CLIPS, grad_clip=100.0)
    learned = {"": {"layer_clip": {"rule": "zscore", "group": "layer", "num_steps": 5, "layers": {}}}}
    assert step(stabilizer, model, 3.0, 4.0, 12.0, learned=learned)["layer_clip/warmup"] == [1.0]
    assert "layer_clip starts without history" in caplog.text


@pytest.mark.parametrize(("group", "after"), [("layer", 9.6), ("kind", 12.0), ("tensor", 9.6)])
def test_what_is_clipped_together_is_as_configured(model, group, after):
    settings = StabilizeConfig(layer_clip=LayerClipConfig("adagc", group=group, warmup=2, relative_factor=1.6))
    stabilizer = Stabilizer(settings, grad_clip=100.0)
    for _ in range(2):
        step(stabilizer, model, 6.0, 8.0, 1.0)
    step(stabilizer, model, 12.0, 8.0, 1.0)  # both layers' are one kind, whose norm of 14.4 may be 16
    assert norms_of(model) == pytest.approx([after, 8.0, 1.0])


def test_there_is_none_while_all_are_off_and_a_clip_that_is_replaced_is_said(capsys):
    assert build_memory(StabilizeConfig(), "actor.grad_clip", 1.0) is None
    assert build_memory(StabilizeConfig(skip_step=SkipStepConfig(enable=True)), "actor.grad_clip", 1.0) is not None
    assert capsys.readouterr().out == ""
    clip = LayerClipConfig(rule="adagc", warmup=7)
    assert build_memory(StabilizeConfig(layer_clip=clip), "actor.grad_clip", 0.5) is not None
    assert "rule=adagc replaces the clip at actor.grad_clip=0.5 after 7 opt" in capsys.readouterr().out


def test_what_was_learned_goes_into_the_checkpoint_and_to_the_workers_once_after_a_resume():
    before, after = StabilizerMemory(), StabilizerMemory()
    assert before.state() is None
    before.after_update({"steps": 3})
    assert before.state() == {"steps": 3} and before.to_send is None
    after.load_state(before.state())
    assert after.to_send == {"steps": 3}
    after.after_update({"steps": 4})
    assert after.to_send is None and after.state() == {"steps": 4}
