# SPDX-License-Identifier: Apache-2.0
"""docs/method.md's sections 3 and 5: how far log-odds bend, and that the sketch keeps its bound."""

import math

import pytest
import torch

from gradloc.search.sketch import _chi2_quantile, measure_norms, sketch
from gradloc.search.task import Span
from tests.search import task_of
from tests.toy_model import Oracle, build, random_batch


def test_3_what_bends_in_log_odds_is_the_logsumexp_of_the_others_within_its_bound():
    torch.manual_seed(0)
    for width in (0.3, 1.0, 2.0):
        worst = 0.0
        for _ in range(200):
            logits, rates = 3 * torch.randn(6, dtype=torch.float64), width * torch.rand(6, dtype=torch.float64)
            up, down = (torch.logsumexp(logits + sign * rates, 0) for sign in (1, -1))
            derivative = float(logits.softmax(0) @ rates)
            worst = max(worst, abs(float(up - down) / 2 - derivative))
        assert 0 < worst <= 1.05 * width**3 / (36 * math.sqrt(3)), "1.05: the next order"


@pytest.fixture(scope="module")
def hidden():
    """A step with two tokens that cancel in its gradient, as a task, and every token's exact norm (M, B, T)."""
    plants = {(5, 1): 3e3, (5, 2): -3e3}
    batch = random_batch(build("tiny")).planted(plants)
    norms = Oracle(build("tiny"), batch).norms([tuple(place) for place in batch.mask.nonzero().tolist()])
    exact = torch.zeros(4, 4, batch.mask.shape[1], dtype=torch.float64)
    for (row, position), size in norms.items():
        exact[row // 4, row % 4, position] = size

    return lambda max_steps=math.inf: task_of(plants, 60.0, max_steps)[0], exact, batch


@pytest.mark.parametrize("k", [4, 16])
def test_5_the_search_s_own_sketch_has_every_norm_under_its_bound_and_none_far_from_it(hidden, k):
    task, exact, batch = hidden
    found = measure_norms(task(), [], k)
    estimates = torch.stack(found.norms)
    assert (estimates * found.inflation >= exact * 0.999).all()
    assert (estimates[exact == 0] == 0).all(), "what is no response token"
    loud = exact > 1e-3 * exact.max()
    ratios = (estimates / exact)[loud]
    assert abs(float(ratios.square().mean()) - 1) < 4.5 * (2 / k) ** 0.5 and ratios.max() < 1 + 4.5 / k**0.5
    quantile = found.inflation**-2 * k  # of chi2_k, at the confidence shared by all tokens
    half = torch.tensor([k / 2, quantile / 2], dtype=torch.float64)
    assert float(torch.special.gammainc(*half)) == pytest.approx(0.05 / batch.num_tokens, rel=1e-6)


def test_5_what_is_named_is_not_estimated_again(hidden):
    task, _, _ = hidden
    mask, named = task().prober.step.token_mask(1), Span(0.0, "token", 1, 0, 5, 6)
    norms = measure_norms(task(), [named], 4).norms
    assert float(norms[1][mask][named.start]) == 0.0 and int((norms[1][mask] == 0).sum()) == 1


def test_5_a_pair_that_cancels_is_found_and_what_is_left_is_bounded(hidden):
    task, exact, batch = hidden
    found = sketch(task())
    (entry,) = [entry for entry in found.path if entry.phase == "sketch"]
    assert sorted(batch.place(culprit.tokens[0], 1, 4) for culprit in found.culprits) == [(5, 1), (5, 2)]
    for culprit in found.culprits:
        row, position = batch.place(culprit.tokens[0], 1, 4)
        assert culprit.is_exact and culprit.norm == pytest.approx(float(exact[row // 4, row % 4, position]), rel=1e-4)
    left = float(exact.flatten().topk(3).values[-1])
    assert left <= entry.norm <= 4 * left and entry.threshold == task().culprit_norm == 15.0
    assert "with 95% confidence; 2 of 2 candidates" in entry.note and not found.exhausted
    assert sketch(task(), found.culprits).culprits == []


@pytest.mark.parametrize(("max_steps", "directions"), [(2.6, 0), (2.7, 4), (10.0, 16)])
def test_5_a_sketch_takes_four_directions_or_none_and_no_more_than_it_may(hidden, max_steps, directions):
    made = hidden[0](max_steps)
    found = sketch(made)
    assert found.exhausted == (directions == 0) and made.prober.cost <= 3 * 4 * max_steps
    assert made.prober.num_forwards - made.prober.num_backwards == (4 * (directions + 1) if directions else 0)
    if not directions:
        assert found.stop_reason == "what search.max_steps=2.6 allows is spent" and found.path == []


@pytest.mark.parametrize(
    ("k", "probability", "value"), [(16, 0.05, 7.9616456), (4, 0.05, 0.7107230), (16, 0.5, 15.3385)]
)
def test_5_quantiles_are_the_tables(k, probability, value):
    assert _chi2_quantile(k, probability) == pytest.approx(value, rel=1e-5)
