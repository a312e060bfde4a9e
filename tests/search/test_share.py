# SPDX-License-Identifier: Apache-2.0
"""Shares add up to 1 whatever carries the gradient, and say how well each is known."""

import math
from dataclasses import replace

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.search.readout import Readout
from gradloc.search.share import ShareMap, measure_shares
from tests.bare import BareStep, Oracle, Sharpened, build, random_batch, shard

M, PLACE = 4, (5, 2)
PLANTS = {
    "one token": {PLACE: 300.0},
    "three": {PLACE: 300.0, (9, 1): -250.0, (14, 0): 280.0},
    "a pair that cancels and a third": {(1, 2): 400.0, (13, 2): -380.0, (6, 1): 300.0},
}


def measured(batch, dtype=torch.float32, wanted=None, **settings):
    """The map along the step's own gradient, and every token's exact share (M, B, T) in float32."""
    step = BareStep(shard(build("tiny"), "plain", dtype), batch, M, dtype)
    space = GradientSpace(step.model)
    step.train()
    direction = space.take()
    prober = Prober(step, space, Ranks())
    is_half = dtype != torch.float32
    readouts = [Readout(step.recorded(i), *step.coefficients(i), is_half) for i in range(M)]
    before = [param.detach().clone() for param in step.model.parameters()]
    found = measure_shares(prober, readouts, direction, 1.0, wanted, **settings)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True)), "restored"
    return found, prober


def exact(batch, places):
    """Each place's share, by a backward of its own."""
    oracle = Oracle(build("tiny"), batch)
    whole = oracle.gradient()
    return {place: float(oracle.gradient([place]) @ whole / (whole @ whole)) for place in places}


def share_of(found, place):
    index, row = divmod(place[0], 4)
    return float(found.shares(index)[row, place[1]]), float(found.errors[index][row, place[1]]) / found.square


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plants", PLANTS.values(), ids=PLANTS)
def test_shares_add_up_and_are_each_what_a_backward_says(plants, dtype):
    batch = random_batch(build("tiny")).planted(plants)
    found, _ = measured(batch, dtype)
    found = found if found.is_trusted else measured(batch, dtype, refined=found)[0]
    assert found.is_trusted
    assert abs(found.closure - 1) < max(0.03 if dtype == torch.float32 else 0.15, 3 * found.closure_error)
    for place, wanted in exact(batch, plants).items():
        share, error = share_of(found, place)
        assert share == pytest.approx(wanted, abs=0.05 + 4 * error)


@pytest.mark.parametrize("p", [0.9, 0.994, 0.9999])
def test_a_token_that_is_nearly_certain_has_a_share_of_one_and_not_more(p):
    batch, model = random_batch(build("tiny")), build("tiny")
    labels = batch.labels.clone()
    labels[PLACE] = Oracle(model, batch).logits(PLACE).argmax()
    factor = 1.0
    while True:
        sharp = batch.edited(labels=labels, amplified=Sharpened(*PLACE, factor))
        log_prob = Oracle(model, sharp).log_prob(PLACE)
        if float(log_prob) > torch.tensor(p).log():
            break
        factor *= 1.05
    old = sharp.old_log_probs.clone()
    old[PLACE] = log_prob  # a ratio of 1, which no clip hides
    sharp = sharp.edited(old_log_probs=old).planted({PLACE: 1e4 / (1 - p)})
    found, prober = measured(sharp)
    assert found.is_trusted and share_of(found, PLACE)[0] == pytest.approx(1.0, abs=0.03)
    assert prober.num_forwards <= 2 * M + 2


def test_a_part_says_what_the_rest_may_carry():
    batch = random_batch(build("tiny")).planted({PLACE: 100.0})
    whole, _ = measured(batch)
    part, prober = measured(batch, wanted=[1], increments=[1.0, 30.0, 1.0, 1.0])
    assert part.seen == {1} and part.unseen > 0 and prober.num_forwards <= 4
    assert abs(whole.closure - part.closure) <= 3 * part.closure_error


def test_a_map_that_is_too_noisy_is_averaged_with_another_draw_and_one_too_bent_is_taken_shorter():
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    first, _ = measured(batch, torch.bfloat16)
    first.shrinking = 1.0
    again, _ = measured(batch, torch.bfloat16, refined=first)
    assert again.num_draws == 2 and again.step == first.step
    (one, _), (both, _) = (share_of(found, PLACE) for found in (first, again))
    assert one != both and both == pytest.approx(one, abs=0.05)
    first.closure, first.shrinking = 0.5, 0.4
    shorter, _ = measured(batch, torch.bfloat16, refined=first)
    assert shorter.num_draws == 1 and shorter.step == pytest.approx(0.4 * first.step)


def test_what_chance_makes_of_many_tokens_is_taken_off():
    batch = random_batch(build("tiny")).planted({PLACE: 20.0})
    found, _ = measured(batch, torch.bfloat16)
    found = found if found.is_trusted else measured(batch, torch.bfloat16, refined=found)[0]
    for place, share in exact(batch, map(tuple, batch.mask.nonzero().tolist())).items():
        index, row = divmod(place[0], 4)
        least = float(found.least(index)[row, place[1]]) / found.square
        assert abs(least) <= abs(share) * 1.15 + 1e-3 and abs(least) <= abs(share_of(found, place)[0])
    assert found.chance == pytest.approx(math.sqrt(2 * math.log(batch.num_tokens)), rel=0.01)


def shares_of(**known):
    nothing = [torch.zeros(1, 1, dtype=torch.float64)]
    defaults = {"square": 1.0, "closure": 1.0, "noise": 0.0, "unseen": 0.0, "is_trusted": True, "num_tokens": 9}
    return ShareMap(nothing, nothing, step=1.0, **(defaults | known))


@pytest.mark.parametrize(
    ("noise", "shrinking", "is_noisy"), [(0.34, 1.0, True), (0.33, 1.0, False), (0.17, 0.5, True), (0.16, 0.5, False)]
)
def test_shares_are_noisy_where_a_third_of_a_standard_error_does_not_tell_one_from_none(noise, shrinking, is_noisy):
    assert shares_of(noise=noise, shrinking=shrinking).is_noisy is is_noisy


@pytest.mark.parametrize(
    ("closure", "unseen", "is_short", "is_far"),
    [
        (0.81, 0.01, True, False),
        (0.79, 0.01, False, False),
        (0.51, 0.01, False, False),
        (0.49, 0.01, True, False),
        (1.01, 0.01, False, False),
        (0.3, 0.01, True, False),
        (0.81, 0.0, False, False),
        (0.34, 0.0, False, False),
        (0.33, 0.0, False, True),
        (2.9, 0.0, False, False),
        (3.1, 0.0, False, True),
    ],
)
def test_what_is_missing_is_what_was_not_read_or_is_far_off(closure, unseen, is_short, is_far):
    found = shares_of(closure=closure, unseen=unseen)
    assert found.is_short is is_short and found.is_far is is_far


def test_a_token_that_something_else_points_at_needs_two_standard_errors():
    found = shares_of(num_tokens=10**6, singled_out=[torch.tensor([[True, False]])])
    found.errors = [torch.tensor([[0.5, 0.5]], dtype=torch.float64)]
    assert found.doubt(0).tolist() == [[1.0, pytest.approx(0.5 * math.sqrt(2 * math.log(1e6)))]]
    assert replace(found, certainty=1.5).doubt(0).tolist() == [[0.75, 0.75]]
    assert replace(found, num_tokens=9).chance == 3.0 and replace(found, singled_out=None).doubt(0)[0, 0] > 2.6


def test_a_step_that_is_far_too_long_is_shortened_and_what_is_not_finite_is_not_trusted():
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    first, _ = measured(batch)
    endless = measured(batch, refined=replace(first, step=1e30, shrinking=0.5))[0]
    assert endless.step == pytest.approx(0.05 * 1e30) and not endless.is_trusted
