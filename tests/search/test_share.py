# SPDX-License-Identifier: Apache-2.0
"""Shares add up to 1 whatever carries the gradient, and say how well each is known; log-odds move linearly where
log-probs do not."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.step import Recorded
from gradloc.search.share import Readout, ShareMap, ShareMeasurement, _scatter, log_odds
from tests.bare import Oracle, Sharpened, build, random_batch
from tests.search import trained

M, PLACE = 4, (5, 2)
PLANTS = {
    "one token": {PLACE: 300.0},
    "three": {PLACE: 300.0, (9, 1): -250.0, (14, 0): 280.0},
    "a pair that cancels and a third": {(1, 2): 400.0, (13, 2): -380.0, (6, 1): 300.0},
}


def measured(batch, dtype=torch.float32, wanted=None, factor=1.0, **settings):
    """The map along the step's own gradient times this factor."""
    step, space = trained(batch, dtype)
    direction = [part * factor for part in space.take()]
    prober = Prober(step, space, Ranks())
    is_half = dtype != torch.float32
    readouts = [Readout(prober.step.recorded(i), *prober.step.coefficients(i), is_half) for i in range(M)]
    before = [param.detach().clone() for param in step.model.parameters()]
    found = ShareMeasurement(prober, readouts, direction, 1.0, range(M) if wanted is None else wanted, **settings).run()
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
    assert found.is_trusted and found.num_tokens == batch.num_tokens
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
    monkeypatch.setattr(
        ShareMeasurement, "_rescaling", lambda self, legs, step, is_first: asked.append(is_first) or 1.0
    )
    part, _ = measured(batch, wanted=[1])
    measured(batch, wanted=[0, 2, 3], known=part)
    measured(batch)
    assert asked == [True, False, True, False]


def rescaled(response, noise, is_first=True, dtype=torch.float32, step=1.0, square=1.0):
    """By what the rule multiplies a step at which log-odds move by ``response`` and closure has this noise."""
    measurement = SimpleNamespace(prober=SimpleNamespace(ranks=Ranks()), dtype=dtype, square=square, target=0.05)
    measurement._response, measurement._noise = lambda legs: [response], lambda legs: noise * step * square
    return ShareMeasurement._rescaling(measurement, ({}, {}), step, is_first)


def response_of(slopes, moves):
    """How far log-odds move where tokens with these slopes move by so much."""
    readout = Readout(recorded(torch.zeros(1, len(slopes)), is_value=True), torch.tensor([slopes]), None, is_half=False)
    (found,) = ShareMeasurement._response(SimpleNamespace(readouts=[readout]), ({0: (torch.tensor([moves]), None)}, {}))
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


# ---- what a forward reads: log-odds, and what scatters is told from what moves


MANY = 400
USUAL = 1.4826**2  # the variance of a normal variable whose median square is 1


def recorded(log_prob: torch.Tensor, is_value: bool = False) -> Recorded:
    made = Recorded(rng=None, is_value=is_value)
    made.log_prob = log_prob
    return made


def from_logit(logit: torch.Tensor) -> torch.Tensor:
    """log p of a token whose log-odds these are."""
    return torch.nn.functional.logsigmoid(logit)


@pytest.mark.parametrize("p", [1e-4, 0.5, 0.9, 0.994, 1 - 1e-4])
@pytest.mark.parametrize("move", [0.1, 0.5, 1.5])
def test_half_a_difference_of_log_odds_is_the_derivative_of_log_p_at_any_p(p, move):
    logit = torch.tensor([[math.log(p / (1 - p))]], dtype=torch.float64)
    readout = Readout(recorded(from_logit(logit)), torch.full((1, 1), -2.0), None, is_half=False)
    up, down = (from_logit(logit + sign * move) for sign in (1, -1))
    assert float(readout.read((up, None)) - readout.read((down, None))) / 2 == pytest.approx(-2.0 * (1 - p) * move)


def test_a_p_that_rounds_to_one_is_a_finite_number_and_carries_nothing():
    assert float(log_odds(torch.zeros(1))) == pytest.approx(24 * math.log(2))
    readout = Readout(recorded(torch.zeros(1, 1)), torch.ones(1, 1), None, is_half=False)
    assert float(readout.read((torch.full((1, 1), -1e-3), None))) == 0


def test_an_entropy_that_moves_is_part_of_what_is_read():
    readout = Readout(recorded(torch.tensor([[-1.0]])), torch.zeros(1, 1), torch.tensor([[3.0]]), is_half=False)
    assert float(readout.read((torch.tensor([[-1.0]]), torch.tensor([[0.5]])))) == 1.5


def test_positions_without_a_coefficient_read_nothing_whatever_they_hold():
    coefficients = torch.tensor([[1.0, 0.0, 0.0]])
    garbage = torch.tensor([[-1.0, -math.inf, math.nan]])
    readout = Readout(recorded(garbage), coefficients, None, is_half=True)
    legs = (garbage + 0.1, None), (garbage - 0.1, None)
    for values in (readout.read(legs[0]), readout.error(*legs)):
        assert values[0, 1:].tolist() == [0, 0] and values.isfinite().all()


def test_a_critics_values_are_read_as_they_are():
    readout = Readout(recorded(torch.tensor([[2.0]]), is_value=True), torch.tensor([[3.0]]), None, is_half=False)
    assert float(readout.read((torch.tensor([[2.5]]), None))) == 7.5


@pytest.mark.parametrize("common", [0.0, 0.2])
def test_the_error_is_that_of_half_a_difference_whatever_both_legs_have_in_common(common):
    """Forwards that scatter by 0.02 each, legs by what a dither does to both alike; tokens that hardly move."""
    torch.manual_seed(0)
    logit = torch.randn(1, MANY, dtype=torch.float64)
    shared = common * torch.randn(1, MANY)
    trained, up, down = (from_logit(logit + part + 0.02 * torch.randn(1, MANY)) for part in (0, shared, shared))
    readout = Readout(recorded(trained), torch.ones(1, MANY), None, is_half=True)
    half = (readout.read((up, None)) - readout.read((down, None))) / 2
    error = readout.error((up, None), (down, None))
    assert float((half / error).square().mean()) == pytest.approx(1, rel=0.4)


def test_a_token_that_scatters_far_more_than_all_others_has_an_error_of_its_own():
    torch.manual_seed(0)
    logit = torch.zeros(1, MANY, dtype=torch.float64)
    noise = 0.02 * torch.randn(2, MANY)
    noise[0, 7] = 1.0
    up, down = (from_logit(logit + noise[number]) for number in range(2))
    error = Readout(recorded(from_logit(logit)), torch.ones(1, MANY), None, is_half=True).error(
        (up, None), (down, None)
    )
    assert float(error[0, 7]) > 0.1 and float(error.median()) < 0.02


def test_a_forward_with_no_move_at_the_legs_own_dither_tells_noise_from_tokens_that_move():
    torch.manual_seed(0)
    logit, true = torch.zeros(1, MANY, dtype=torch.float64), 0.1 * torch.randn(1, MANY)
    dither = 0.2 * torch.randn(1, MANY)
    moves = (0, dither + true, dither - true, dither)
    trained, up, down, still = ((from_logit(logit + move + 0.02 * torch.randn(1, MANY)), None) for move in moves)
    readout = Readout(recorded(trained[0]), torch.ones(1, MANY), None, is_half=True)
    off = (readout.read(up) - readout.read(down)) / 2 - readout.slope * true
    part = readout.scatter(up, down, still)
    assert float((off / readout.error(up, down, part)).square().mean()) == pytest.approx(1, rel=0.4)
    assert float((off / readout.error(up, down)).square().mean()) < 0.1
    assert readout.scatter(up, down, (up[0] + 1, None)) == 1


def test_in_float32_only_rounding_is_an_error():
    logit = torch.tensor([[0.0, 12.0]], dtype=torch.float64)
    readout = Readout(recorded(from_logit(logit)), torch.ones(1, 2), None, is_half=False)
    legs = (from_logit(logit + 0.3), None), (from_logit(logit - 0.1), None)
    assert readout.error(*legs).tolist() == [[pytest.approx(2**-20 / 2**0.5)] * 2]


@pytest.mark.parametrize(
    ("own", "moved", "part", "variance"),
    [
        (1.0, 9.0, 1.0, USUAL / 2 * (1 + 3 * USUAL) / (4 * USUAL)),
        (1.0, 9.0, 0.5, USUAL / 8 * (1 + 3 * USUAL) / (4 * USUAL)),
        (5.0, 9.0, 1.0, USUAL / 2 * (25 + 3 * USUAL) / (4 * USUAL)),
        (5.9, 9.0, 1.0, USUAL / 2 * (34.81 + 3 * USUAL) / (4 * USUAL)),
        (6.0, 9.0, 1.0, 36.0),  # more than four standard deviations, which are 5.93
        (1.0, 0.1, 1.0, 0.01 * USUAL * (1 + 3 * USUAL) / (4 * USUAL)),
    ],
)
def test_noise_is_the_smaller_of_two_bounds_more_for_a_token_that_is_off_and_in_full_far_off(
    own, moved, part, variance
):
    """The half sums of all tokens but the first are 1 off training's reading, half their differences ``moved``."""
    signs = torch.tensor([1.0, -1.0] * 50, dtype=torch.float64)
    middle = signs.clone()
    middle[0] = own
    found = _scatter(middle + moved * signs, middle - moved * signs, signs * 0, signs != 0, part)
    assert float(found[0]) == pytest.approx(variance)


def test_the_part_of_the_bound_that_is_noise_is_read_off_a_forward_without_a_move():
    """Of values: half sums are 1 off training's reading, and half of that off the forward without a move."""
    signs = torch.tensor([[1.0, -1.0] * 50])
    readout = Readout(recorded(signs * 0, is_value=True), torch.ones(1, 100), None, is_half=True)
    found = readout.scatter((signs + 9.0, None), (signs - 9.0, None), (signs / 2, None))
    bound = USUAL / 2 * (1 + 3 * USUAL) / (4 * USUAL)
    assert found == pytest.approx(1.4826 * (0.25 / 3 / bound) ** 0.5)


def test_an_entropy_term_counts_in_a_token_s_weight_and_in_its_error():
    signs = torch.tensor([[1.0, -1.0] * 50])
    made = recorded(from_logit(torch.zeros(1, 100, dtype=torch.float64)))
    made.entropy = signs * 0
    readout = Readout(made, torch.full((1, 100), -1e-9), torch.full((1, 100), 2.0), is_half=True)
    assert float(readout.weight[0, 0]) == pytest.approx(2.0)
    error = readout.error((made.log_prob, signs + 9.0), (made.log_prob, signs - 9.0))
    variance = USUAL / 2 * (1 + 3 * USUAL) / (4 * USUAL)
    assert float(error[0, 0]) == pytest.approx(2.0 * variance**0.5)
