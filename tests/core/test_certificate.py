# SPDX-License-Identifier: Apache-2.0
"""What a certificate says of the norm without the culprits, and how large it takes its own error to be."""

import math
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.certificate import Removal, fullest, is_subtracted, judge, recompute
from gradloc.core.ranks import Ranks
from gradloc.core.selection import Token
from gradloc.core.step import Numerics


@pytest.mark.parametrize(
    ("norm", "bound", "threshold", "verdict"),
    [
        (1.0, 0.0, 10.0, "explained"),
        (1.0, 4.4, 10.0, "explained"),
        (1.0, 4.6, 10.0, "undecided"),
        (19.0, 4.4, 10.0, "not_explained"),
        (19.0, 4.6, 10.0, "undecided"),
        (10.0, 0.0, 10.0, "undecided"),
        (math.nan, 0.0, 10.0, "not_explained"),
        (1.0, math.nan, 10.0, "undecided"),
        (1.0, 0.0, None, "undecided"),
    ],
)
def test_a_verdict_needs_a_bound_below_half_the_distance_to_the_threshold(norm, bound, threshold, verdict):
    assert judge(norm, bound, threshold)[0] == verdict


@pytest.mark.parametrize(("norm_after", "verdict"), [(3.0, "explained"), (math.inf, "not_explained")])
def test_what_was_not_finite_is_explained_by_being_finite_where_there_is_no_threshold_yet(norm_after, verdict):
    assert judge(norm_after, 0.1, None, was_finite=False)[0] == verdict


@pytest.mark.parametrize(
    ("norm_before", "threshold", "reason"),
    [(9.0, 4.0, "no culprit was found"), (9.0, None, "a rehearsal"), (math.nan, None, "no culprit was found")],
)
def test_without_culprits_the_norm_is_what_it_was_and_the_reason_says_why(norm_before, threshold, reason):
    found = Removal(prober_of(), [], 1.0, norm_before, threshold, []).certify()
    assert found.method == "none" and found.norm_after is found.norm_before and found.reason.startswith(reason)


def prober_of(dtype=torch.float32, rounding=0.0, reduction_error=0.0, **known):
    """Of four micro-batches with five tokens each."""
    step = SimpleNamespace(
        numerics=Numerics(dtype), num_micro_batches=4, token_mask=lambda index: torch.ones(1, 5, dtype=torch.bool)
    )
    space = SimpleNamespace(rounding=rounding, **known)
    return SimpleNamespace(step=step, space=space, ranks=Ranks(), reduction_error=reduction_error)


@pytest.mark.parametrize(
    ("prober", "most"),
    [
        (prober_of(), 4.0 / 4 * 2**16 / 8),
        (prober_of(torch.bfloat16), 4.0 / 4 * 2**8 / 8),
        (prober_of(torch.bfloat16, rounding=1.0), 1.0 / (8 / 2**8 + 4 + 3 + 4)),
        (prober_of(torch.bfloat16, reduction_error=0.5), 1.0 / (8 / 2**8 + 0.5)),
    ],
)
def test_culprits_are_subtracted_where_its_errors_are_a_quarter_of_the_threshold_at_most(prober, most):
    assert is_subtracted(prober, 0.999 * most, 4.0, 3) and not is_subtracted(prober, 1.001 * most, 4.0, 3)
    assert is_subtracted(prober, 1e9, None, 3), "a rehearsal has nothing to decide"


def removal(holders=(0,), threshold=4.0, norm_before=10.0, prober=None, can_afford=lambda num: True):
    culprits = [Token(index, 0, 0) for index in holders]
    return Removal(prober or prober_of(), [], 1.0, norm_before, threshold, culprits, can_afford)


@pytest.mark.parametrize(
    ("holders", "norm_before", "way", "cost"),
    [
        ([1], 10.0, "subtract", 2),
        ([1, 1, 1], 10.0, "subtract", 2),
        ([1, 2], 10.0, None, None),
        ([0, 1, 2, 3], 10.0, None, None),
        ([1], 1e6, "swap", 3),
        ([1, 2], 1e6, None, None),
    ],
)
def test_culprits_are_taken_out_by_what_costs_less_than_a_pass(monkeypatch, holders, norm_before, way, cost):
    asked = []
    monkeypatch.setattr(Removal, "_subtract", lambda self: "subtract")
    monkeypatch.setattr(Removal, "_swap", lambda self: "swap")
    made = removal(holders, norm_before=norm_before, can_afford=lambda num: asked.append(num) or True)
    assert made.measure() == way and asked == ([cost + 4] if way else [])
    assert removal(holders, norm_before=norm_before, can_afford=lambda num: False).measure() is None


@pytest.mark.parametrize(
    ("way", "norms", "noise", "num_additions"),
    [
        ("subtract", [9.0, 0.01, 1.0], 3 * 0.01 + 9.0 / 2**16, 1 + 2),
        ("swap", [9.0, 0.0, 2.0, 1.0], 0.0, 1 + 4),  # kernels that repeat
        ("swap", [9.0, 0.01, 2.0, 1.0], 3 * 0.01 + 9.0 / 2**8, 1 + 4),
        ("swap", [9.0, 0.7, 2.0, 1.0], None, None),  # three times that is over half the threshold
    ],
)
def test_the_error_is_the_replays_difference_three_times_a_unit_and_what_additions_round(
    way, norms, noise, num_additions
):
    """``norms``: of what was replayed, of its difference, in a swap of the part without culprits, and what is left."""
    told, largest = list(norms), norms[0] + (norms[2] if way == "swap" else 0.0)

    def nothing(*given, **named):
        return []

    prober = prober_of(rounding=1e-3, norm=lambda gradient=None: told.pop(0), keep=nothing, scale=nothing)
    prober.compute = prober.compute_only = prober.compute_without = prober.add = nothing
    made = removal(prober=prober)
    found = made._swap() if way == "swap" else made._subtract()
    if noise is None:
        assert found is None and told == norms[2:], "before anything more is run"
        return
    rounding = 1e-3 * ((4 + 2) * 10.0 + num_additions * largest)
    assert found == (1.0, pytest.approx(rounding + noise), norms[1], way)


@pytest.mark.parametrize(
    ("norm_after", "noise", "threshold", "is_decided"),
    [
        (1.0, 0.5, 4.0, True),
        (3.0, 0.6, 4.0, False),  # undecided
        (10.0, 0.9, 4.0, True),
        (10.0, 1.1, 4.0, False),  # no direction to search along
        (0.2, 0.3, 4.0, False),  # hardly known, where a pass tells it
        (3.0, 0.6, None, True),
    ],
)
def test_what_was_measured_is_kept_where_it_decides(norm_after, noise, threshold, is_decided):
    found = removal(threshold=threshold)._decided(norm_after, 0.01, noise, 0.1, "swap")
    assert found == ((norm_after, 0.01 + noise, 0.1, "swap") if is_decided else None)


def test_a_bound_over_the_norm_is_lived_with_where_no_pass_can_be_afforded():
    asked = []
    made = removal(can_afford=lambda num: asked.append(num) or False)
    assert made._decided(0.2, 0.01, 0.3, 0.1, "swap") == (0.2, 0.31, 0.1, "swap") and asked == [4]


@pytest.mark.parametrize(
    ("norm_after", "difference", "goes_on", "threshold", "is_repeated"),
    [
        (1.0, 0.01, False, 4.0, False),  # decided
        (3.9, 0.01, True, 4.0, True),
        (3.9, 0.0, False, 4.0, True),
        (4.1, 0.01, True, 4.0, False),  # the search goes on anyhow
        (4.1, 0.01, False, 4.0, True),
        (4.1, 0.01, True, None, False),
        (math.inf, 0.01, False, 4.0, False),
    ],
)
def test_a_pass_that_does_not_decide_is_held_against_one_micro_batch_twice(
    norm_after, difference, goes_on, threshold, is_repeated
):
    norms, computed, asked = [norm_after, difference], [], []
    prober = prober_of(
        rounding=1e-4, norm=lambda: norms.pop(0), keep=lambda: "kept", put=lambda part: computed.append(part)
    )
    prober.reduction_error = 1e-3
    prober.add = lambda part, alpha: computed.append((part, alpha))
    culprits = [Token(0, 0, 0), Token(0, 0, 1), Token(1, 0, 0), Token(3, 0, 0)]
    ways = {"to_repeat": lambda: fullest(prober, culprits), "can_afford": lambda num: asked.append(num) or True}
    found = recompute(prober, computed.append, threshold=threshold, goes_on=goes_on, **ways)
    rounding = (4**2 * 1e-4 + 1e-3) * norm_after
    if not is_repeated:
        assert found == (norm_after, pytest.approx(rounding + 0.1 * norm_after), None)
        assert computed == [range(4)] and asked == []
        return
    noise = 3 * difference * 2**0.5 + norm_after / 256 if difference else 0.0
    assert found == (norm_after, pytest.approx(rounding + noise), difference) and asked == [2]
    assert computed == [range(4), [2], [2], ("kept", -1.0), "kept"], "the micro-batch that has most tokens left"
