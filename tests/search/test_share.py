# SPDX-License-Identifier: Apache-2.0
"""Shares add up to 1 whatever carries the gradient, and say how well each is known; log-odds move linearly where
log-probs do not."""

import math

import pytest
import torch

from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.step import Recorded
from gradloc.search.share import Readout, ShareMeasurement, log_odds
from tests.search import trained
from tests.toy_model import Oracle, Sharpened, build, random_batch

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
    readouts = [Readout(prober.step.recorded(i), *prober.step.coefficients(i)) for i in range(M)]
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


def test_along_no_direction_nothing_has_a_share():
    batch = random_batch(build("tiny")).planted({PLACE: 300.0})
    found, prober = measured(batch, factor=0.0, wanted=[1], increments=[1.0] * M)
    told = (found.square, found.closure, found.noise, found.unseen, found.step, found.num_tokens, found.is_trusted)
    assert told == (0.0, 0.0, 0.0, 0.0, 0.0, 0, False) and prober.num_forwards == 0
    assert all(not part.any() for part in [*found.products, *found.errors])


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
    readout = Readout(recorded(from_logit(logit)), torch.full((1, 1), -2.0), None)
    up, down = (from_logit(logit + sign * move) for sign in (1, -1))
    assert float(readout.read((up, None)) - readout.read((down, None))) / 2 == pytest.approx(-2.0 * (1 - p) * move)


def test_a_p_that_rounds_to_one_is_a_finite_number_and_carries_nothing():
    assert float(log_odds(torch.zeros(1))) == pytest.approx(24 * math.log(2))
    readout = Readout(recorded(torch.zeros(1, 1)), torch.ones(1, 1), None)
    assert float(readout.read((torch.full((1, 1), -1e-3), None))) == 0


def test_positions_without_a_coefficient_read_nothing_whatever_they_hold():
    coefficients = torch.tensor([[1.0, 0.0, 0.0]])
    garbage = torch.tensor([[-1.0, -math.inf, math.nan]])
    readout = Readout(recorded(garbage), coefficients, None)
    legs = (garbage + 0.1, None), (garbage - 0.1, None)
    for values in (readout.read(legs[0]), readout.error(0.1)):
        assert values[0, 1:].tolist() == [0, 0] and values.isfinite().all()


def test_a_critics_values_are_read_as_they_are():
    readout = Readout(recorded(torch.tensor([[2.0]]), is_value=True), torch.tensor([[3.0]]), None)
    assert float(readout.read((torch.tensor([[2.5]]), None))) == 7.5
