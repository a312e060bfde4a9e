# SPDX-License-Identifier: Apache-2.0
"""The laws of the weights on ratios: what is inside of the bounds counts whole, what is outside of them less."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.stabilize.config import SeqClipConfig, StabilizeConfig, TokenClipConfig
from gradloc.stabilize.ratio_clip import TokenWeigher, ratio_weights
from tests.stabilize import slow

LOG_RATIOS = st.lists(st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4), min_size=3, max_size=3)
MASKS = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=3, max_size=3)
BOUNDS = st.tuples(st.none() | st.floats(1, 50), st.none() | st.floats(0.02, 1))


@given(LOG_RATIOS, MASKS, BOUNDS, st.sampled_from(["token", "geometric"]), st.sampled_from(["mask", "clamp"]))
def test_weights_are_the_slow_loops_whatever_the_bounds(log_ratios, masks, bounds, level, mode):
    case = {"level": level, "mode": mode, "upper": bounds[0], "lower": bounds[1]}
    log_ratio, mask = torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(masks)
    weights, metrics = ratio_weights(log_ratio.where(mask.bool(), math.nan), mask, **case)  # padding may hold anything
    expected = torch.tensor(slow.token_weights(log_ratio.tolist(), masks, **case), dtype=torch.float64)
    counted = mask.bool()
    if not counted.any():
        assert bool((weights == 1).all()) and metrics == {"share": 0.0, "ratio_max": 1.0, "ratio_min": 1.0}
        return
    # on a bound the slow one may round to the other side of it
    near = torch.zeros_like(counted)
    means = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratios = (log_ratio if level == "token" else means.expand_as(log_ratio)).clamp(-20, 20).exp()
    for bound in bounds:
        near |= torch.tensor(False) if bound is None else (ratios / bound - 1).abs() < 1e-9
    torch.testing.assert_close(weights[counted & ~near], expected[counted & ~near])
    assert metrics["ratio_max"] == pytest.approx(float(ratios[counted].max()))
    assert metrics["ratio_min"] == pytest.approx(float(ratios[counted].min()))
    if not near.any():
        assert metrics["share"] == pytest.approx(float((expected[counted] < 1).double().mean()))


@pytest.mark.parametrize(("mode", "outside"), [("mask", 0.0), ("clamp", 0.5)])
def test_a_ratio_on_a_bound_is_inside_and_one_that_is_no_number_is_not(mode, outside):
    ratios = torch.tensor([[2.0, 4.0, 0.5, 0.25, math.nan, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    weights, metrics = ratio_weights(ratios.log(), mask, "token", mode, 2.0, 0.5)
    assert torch.equal(ratios.log().exp()[0, :4], ratios[0, :4]), "on the bound"
    assert weights[0, :4].tolist() == pytest.approx([1.0, outside, 1.0, outside])
    assert metrics["share"] == pytest.approx(3 / 5), "NaN is outside"
    assert not weights[0, 4] == 1


def weigher(**clips):
    return TokenWeigher(StabilizeConfig(**clips))


LOG_PROB = torch.log(torch.tensor([[0.8, 0.2], [0.1, 0.1]]))
INPUTS = {"rollout_log_probs": torch.log(torch.tensor([[0.1, 0.2], [0.1, 0.1]])), "response_mask": torch.ones(2, 2)}


def test_both_clips_weigh_and_so_does_what_the_trainer_gives_and_nothing_is_differentiated():
    both = {"token_clip": TokenClipConfig("mask", upper=5.0), "seq_clip": SeqClipConfig("clamp", upper=1.4)}
    log_prob, metrics = LOG_PROB.clone().requires_grad_(), {}
    found = weigher(**both).token_weights(INPUTS, log_prob, torch.full((2, 2), 0.5), metrics)
    of_sequence = 1.4 / math.sqrt(8)
    assert found.flatten().tolist() == pytest.approx([0.0, 0.5 * of_sequence, 0.5, 0.5]) and not found.requires_grad
    assert metrics["gradloc/token_clip/share"] == pytest.approx(1 / 4)
    assert metrics["gradloc/seq_clip/share"] == pytest.approx(1 / 2)
    alone = weigher(seq_clip=both["seq_clip"]).token_weights(INPUTS, log_prob, None, {})
    assert alone[0].tolist() == pytest.approx([of_sequence] * 2)


def test_a_clip_asks_for_the_rollouts_log_probs():
    with pytest.raises(ValueError, match="calculate_log_probs=true"):
        weigher(seq_clip=SeqClipConfig("mask")).token_weights({}, LOG_PROB, None, {})
