# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights, and the sentence about a difference."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.loop.fingerprint import differs, fingerprint
from gradloc.record.bundle import Fingerprint


def of(model):
    return fingerprint(GradientSpace(model))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 30))


def test_it_is_count_sum_and_sum_of_squares_of_each_parameter_and_of_all(model):
    found, params = of(model), dict(model.named_parameters())
    assert list(found.parameters) == list(params)
    for name, param in params.items():
        count, total, square = found.parameters[name]
        assert count == param.numel() and total == pytest.approx(float(param.double().sum()), rel=1e-9)
        assert square == pytest.approx(float(param.double().square().sum()), rel=1e-9)
    sums = [sum(entry[at] for entry in found.parameters.values()) for at in range(3)]
    assert found.total == pytest.approx(sums) and found.total[0] == 2050 + 1530


def test_the_same_weights_are_the_same_and_one_changed_weight_is_named(model):
    before, other = of(model), copy.deepcopy(model)
    assert differs(before, of(other)) is None
    with torch.no_grad():
        other[1].weight[3, 4] += 1.0
        other[1].bias[0] += 0.5
    said = differs(before, of(other))
    assert "in 2 of 4 parameters, in 1." in said and "rounding" not in said


def test_without_names_the_totals_are_compared(model):
    before, other = replace(of(model), parameters=None), copy.deepcopy(model)
    assert differs(before, of(other)) is None
    with torch.no_grad():
        other[0].bias += 1.0
    assert differs(before, of(other)) == "The weights differ from those of the event in their totals."


def test_weights_that_were_rounded_to_bfloat16_are_said_to_be_that_and_a_step_is_not(model):
    half, step = copy.deepcopy(model).bfloat16(), copy.deepcopy(model)
    assert "by no more than rounding to bfloat16 would" in differs(of(model), of(half.float()))
    with torch.no_grad():
        for param in step.parameters():
            param += 0.05
    assert "rounding" not in differs(of(model), of(step))


ONE = (4, 1.0, 2.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": ONE, "b": ONE}, {"a": ONE}, "only the event's model has the parameter b."),
        ({"a": ONE}, dict.fromkeys("abc", ONE), "only the given model has the parameter b and 1 more."),
        ({"a": ONE}, {"a": (6, 1.0, 2.0)}, "a has 4 weights in the event's model and 6 in the given one."),
    ],
)
def test_another_architecture_is_told_as_such(ours, theirs, said):
    told = differs(Fingerprint(ONE, ours), Fingerprint(ONE, theirs))
    assert told == f"This is another model than the event's: {said}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_like_itself_alone(value):
    plain = Fingerprint((9, 5.0, 6.0), {"x": (4, 1.0, 2.0), "y": (5, 4.0, 4.0)})
    broken = Fingerprint((9, value, value), {"x": (4, value, 2.0), "y": (5, 5.0, 4.0)})
    assert differs(broken, broken) is None
    assert "in x most" in differs(plain, broken) and "in x most" in differs(broken, plain)
