# SPDX-License-Identifier: Apache-2.0
"""Log-odds move linearly where log-probs do not; what scatters is told from what moves."""

import math

import pytest
import torch

from gradloc.core.step import Recorded
from gradloc.search.readout import Readout, _scatter, log_odds

MANY = 400
USUAL = 1.4826**2  # the variance of a normal variable whose median square is 1


def recorded(log_prob: torch.Tensor, is_value: bool = False) -> Recorded:
    made = Recorded(rng=None, is_value=is_value)
    made.log_prob = log_prob
    return made


def of_logit(logit: torch.Tensor) -> torch.Tensor:
    """log p of a token whose log-odds these are."""
    return torch.nn.functional.logsigmoid(logit)


@pytest.mark.parametrize("p", [1e-4, 0.5, 0.9, 0.994, 1 - 1e-4])
@pytest.mark.parametrize("move", [0.1, 0.5, 1.5])
def test_half_a_difference_of_log_odds_is_the_derivative_of_log_p_at_any_p(p, move):
    logit = torch.tensor([[math.log(p / (1 - p))]], dtype=torch.float64)
    readout = Readout(recorded(of_logit(logit)), torch.full((1, 1), -2.0), None, is_half=False)
    up, down = (of_logit(logit + sign * move) for sign in (1, -1))
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
    trained, up, down = (of_logit(logit + part + 0.02 * torch.randn(1, MANY)) for part in (0, shared, shared))
    readout = Readout(recorded(trained), torch.ones(1, MANY), None, is_half=True)
    half = (readout.read((up, None)) - readout.read((down, None))) / 2
    error = readout.error((up, None), (down, None))
    assert float((half / error).square().mean()) == pytest.approx(1, rel=0.4)


def test_a_token_that_scatters_far_more_than_all_others_has_an_error_of_its_own():
    torch.manual_seed(0)
    logit = torch.zeros(1, MANY, dtype=torch.float64)
    noise = 0.02 * torch.randn(2, MANY)
    noise[0, 7] = 1.0
    up, down = (of_logit(logit + noise[number]) for number in range(2))
    error = Readout(recorded(of_logit(logit)), torch.ones(1, MANY), None, is_half=True).error((up, None), (down, None))
    assert float(error[0, 7]) > 0.1 and float(error.median()) < 0.02


def test_a_forward_with_no_move_at_the_legs_own_dither_tells_noise_from_tokens_that_move():
    torch.manual_seed(0)
    logit, true = torch.zeros(1, MANY, dtype=torch.float64), 0.1 * torch.randn(1, MANY)
    dither = 0.2 * torch.randn(1, MANY)
    moves = (0, dither + true, dither - true, dither)
    trained, up, down, still = ((of_logit(logit + move + 0.02 * torch.randn(1, MANY)), None) for move in moves)
    readout = Readout(recorded(trained[0]), torch.ones(1, MANY), None, is_half=True)
    off = (readout.read(up) - readout.read(down)) / 2 - readout.slope * true
    part = readout.scatter(up, down, still)
    assert float((off / readout.error(up, down, part)).square().mean()) == pytest.approx(1, rel=0.4)
    assert float((off / readout.error(up, down)).square().mean()) < 0.1
    assert readout.scatter(up, down, (up[0] + 1, None)) == 1


def test_in_float32_only_rounding_is_an_error():
    logit = torch.tensor([[0.0, 12.0]], dtype=torch.float64)
    readout = Readout(recorded(of_logit(logit)), torch.ones(1, 2), None, is_half=False)
    legs = (of_logit(logit + 0.3), None), (of_logit(logit - 0.1), None)
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
    made = recorded(of_logit(torch.zeros(1, 100, dtype=torch.float64)))
    made.entropy = signs * 0
    readout = Readout(made, torch.full((1, 100), -1e-9), torch.full((1, 100), 2.0), is_half=True)
    assert float(readout.weight[0, 0]) == pytest.approx(2.0)
    error = readout.error((made.log_prob, signs + 9.0), (made.log_prob, signs - 9.0))
    variance = USUAL / 2 * (1 + 3 * USUAL) / (4 * USUAL)
    assert float(error[0, 0]) == pytest.approx(2.0 * variance**0.5)
