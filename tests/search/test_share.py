# SPDX-License-Identifier: Apache-2.0
"""Shares add up to 1 whatever carries the gradient, and say how well each is known."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.step import Recorded
from gradloc.search.readout import Readout
from gradloc.search.share import ShareMap, _Measurement, measure_shares
from tests.bare import BareStep, Oracle, Sharpened, build, random_batch, shard

M, PLACE = 4, (5, 2)
PLANTS = {
    "one token": {PLACE: 300.0},
    "three": {PLACE: 300.0, (9, 1): -250.0, (14, 0): 280.0},
    "a pair that cancels and a third": {(1, 2): 400.0, (13, 2): -380.0, (6, 1): 300.0},
}


def measured(batch, dtype=torch.float32, wanted=None, factor=1.0, **settings):
    """The map along the step's own gradient times this factor."""
    step = BareStep(shard(build("tiny"), "plain", dtype), batch, M, dtype)
    space = GradientSpace(step.model)
    step.train()
    direction = [part * factor for part in space.take()]
    prober = Prober(step, space, Ranks())
    is_half = dtype != torch.float32
    readouts = [Readout(step.recorded(i), *prober.step.coefficients(i), is_half) for i in range(M)]
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


def test_a_mean_of_draws_weighs_them_alike_and_errs_less():
    def value(number):
        return torch.tensor([[number]], dtype=torch.float64)

    before = SimpleNamespace(products=[value(2.0)], errors=[value(0.3)], num_draws=2)
    known = {"draw": 2, "square": 4.0, "carried_unseen": 0.0, "seen": frozenset({0}), "mean_of": before}
    made = SimpleNamespace(prober=SimpleNamespace(ranks=Ranks()), readouts=[SimpleNamespace(slope=value(1.0))], **known)
    made._is_trusted, made._shrinking = lambda closure, noise: True, lambda closure, noise: 1.0
    found = _Measurement._combine(made, {0: (value(5.0), value(0.6))}, 1.0)
    assert found.num_draws == 3 and float(found.products[0]) == pytest.approx(3.0)
    assert float(found.errors[0]) == pytest.approx((0.6**2 + 0.6**2) ** 0.5 / 3)
    assert (found.closure, found.noise) == (pytest.approx(0.75), pytest.approx(float(found.errors[0]) / 4))


def test_where_micro_batches_cancel_the_first_step_is_as_much_shorter():
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    plain, _ = measured(batch)
    norm = plain.square**0.5
    for loudest, part in ((10.0, 0.1), (0.5, 1.0)):
        assert measured(batch, increments=[loudest * norm, 0.0, 0.0, 0.0])[0].step == pytest.approx(part * plain.step)


@pytest.mark.parametrize(("sizes", "unseen"), [([0.0, 9.0, 0.3, 0.4], 0.25), ([9.0, 9.0, 9.0, 9.0], 1.0), (None, 1.0)])
def test_what_was_not_read_carries_its_part_of_the_squared_norm_at_most_all(sizes, unseen):
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    norm = measured(batch)[0].square ** 0.5
    found, _ = measured(batch, wanted=[0, 1], increments=sizes and [size * norm for size in sizes])
    assert found.unseen == pytest.approx(unseen)


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


def test_along_no_direction_nothing_has_a_share():
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    found, prober = measured(batch, factor=0.0, wanted=[1], increments=[1.0] * M)
    told = (found.square, found.closure, found.noise, found.unseen, found.step, found.num_tokens, found.is_trusted)
    assert told == (0.0, 0.0, 0.0, 0.0, 0.0, 0, False) and prober.num_forwards == 0
    assert all(not part.any() for part in [*found.products, *found.errors])


def test_only_the_first_micro_batch_settles_the_step(monkeypatch):
    batch, asked = random_batch(build("tiny")).planted({PLACE: 300.0}), []
    monkeypatch.setattr(_Measurement, "_rescaling", lambda self, legs, step, is_first: asked.append(is_first) or 1.0)
    part, _ = measured(batch, wanted=[1])
    measured(batch, wanted=[0, 2, 3], known=part)
    measured(batch)
    assert asked == [True, False, True, False]


def rescaled(response, noise, is_first=True, dtype=torch.float32, step=1.0, square=1.0):
    """By what the rule multiplies a step at which log-odds move by ``response`` and closure has this noise."""
    measurement = SimpleNamespace(prober=SimpleNamespace(ranks=Ranks()), dtype=dtype, square=square, target=0.05)
    measurement._response, measurement._noise = lambda legs: [response], lambda legs: noise * step * square
    return _Measurement._rescaling(measurement, ({}, {}), step, is_first)


@pytest.mark.parametrize(
    ("response", "noise", "factor"),
    [
        (math.inf, 0.0, 0.1),
        (0.0, 1.0, 1.0),
        (0.31, 0.0, 1.0),
        (0.32, 0.0, 0.05 / 0.32),
        (1.0, 0.01, 0.025 ** (1 / 3)),
        (0.4, 0.01, 1.0),
        (10.0, 0.0, 0.1),
        (1e-3, 1.0, 10.0),
    ],
)
def test_a_step_is_taken_anew_where_that_halves_a_large_error(response, noise, factor):
    assert rescaled(response, noise) == pytest.approx(factor) == rescaled(response, noise, step=2.0, square=3.0)

    def error(response_then):
        return 0.2 * response_then**2 + noise * response / response_then

    if 0.1 < factor < 1 and noise:
        best = factor * response
        assert error(best) < min(error(0.98 * best), error(1.02 * best), error(response) / 2)


def test_half_precision_lives_with_larger_errors_and_later_micro_batches_with_twice_the_target():
    assert rescaled(0.8, 0.0, dtype=torch.bfloat16) == 1.0 and rescaled(0.9, 0.0, dtype=torch.bfloat16) == 0.1
    assert rescaled(0.1, 1.0, is_first=False) == 1.0
    assert rescaled(0.11, 0.0, is_first=False) == pytest.approx(0.05 / 0.11)


def response_of(slopes, moves):
    """How far log-odds move where tokens with these slopes move by so much."""
    recorded = Recorded(rng=None, is_value=True)
    recorded.log_prob = torch.zeros(1, len(slopes))
    readout = Readout(recorded, torch.tensor([slopes]), None, is_half=False)
    (found,) = _Measurement._response(SimpleNamespace(readouts=[readout]), ({0: (torch.tensor([moves]), None)}, {}))
    return found


@pytest.mark.parametrize(
    ("slopes", "moves", "response"),
    [
        ([1.0, -2.0, 0.0], [3.0, 1.0, 9.0], 3.0),
        ([1.0, 0.01], [1.0, 5.0], 1.0),
        ([1.0] * 20, [1.0] * 10 + [3.0] * 10, 2.5),
        ([1.0, 2.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [1.0, 1.0], 0.0),
        ([1.0, 1.0], [1.0, math.inf], math.inf),
    ],
)
def test_tokens_that_carry_a_notable_part_say_how_far_log_odds_move(slopes, moves, response):
    assert response_of(slopes, moves) == pytest.approx(response)


def judged(rule, closure, noise, dtype=torch.float32, unread=()):
    return rule(SimpleNamespace(dtype=dtype, carried_unseen=sum(unread), unseen=unread), closure, noise)


@pytest.mark.parametrize(
    ("closure", "noise", "unread", "is_trusted"),
    [
        (1.02, 0.0, (), True),
        (0.96, 0.0, (), False),
        (1.04, 0.0, (), False),
        (1.04, 0.015, (), True),
        (0.8, 0.3, (), True),
        (1.0, 0.34, (), False),
        (0.8, 0.0, (0.1,), True),
        (0.76, 0.0, (0.1,), False),
        (0.51, 0.0, (1.0,), True),
        (0.49, 0.0, (1.0,), False),
        (1.04, 0.0, (1.0,), False),
    ],
)
def test_closure_is_trusted_within_its_band_its_noise_and_what_was_not_read(closure, noise, unread, is_trusted):
    assert judged(_Measurement._is_trusted, closure, noise, unread=unread) is is_trusted
    if noise == 0.0 and not unread:  # the band is five times as wide
        assert judged(_Measurement._is_trusted, 1 + 5 * (closure - 1), 0.0, torch.bfloat16) is is_trusted


@pytest.mark.parametrize(
    ("closure", "noise", "unread", "shrinking"),
    [
        (1.02, 0.0, (), 1.0),
        (0.9, 0.04, (), 1.0),
        (0.625, 0.125, (), 1.0),
        (0.9, 0.0, (0.08,), 1.0),
        (0.9, 0.0, (), 0.1),
        (0.9, 0.03, (), 0.15 ** (1 / 3)),
        (1.2, 0.2, (), 1.0),
        (1.7, 0.0001, (), 0.1),
        (1.5, 0.1, (), 0.25),
        (1.65, 0.2, (), 0.1),
        (1.25, 0.08, (), 0.16 ** (1 / 3)),
    ],
)
def test_a_step_is_shortened_where_it_is_curvature_that_puts_closure_off(closure, noise, unread, shrinking):
    assert judged(_Measurement._shrinking, closure, noise, unread=unread) == pytest.approx(shrinking)
