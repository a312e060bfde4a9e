# SPDX-License-Identifier: Apache-2.0
"""A norm that only its coefficients' size made infinite is searched like any other, and told in training's own unit."""

import math
from dataclasses import replace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.search.find import localize
from tests.search import spike_of, trained
from tests.toy_model import Oracle, build, random_batch
from tests.toy_model.scenarios import NUM_MICRO_BATCHES, TERMS, search_planted

ONE = {(3, 5): 1.0}
SCALES = [1e22, 1e37]


def norm_of_one(place):
    model = build("tiny")
    return Oracle(model, random_batch(model).planted({place: 1e4}), TERMS).norm(place) / 1e4


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("strategy", ["auto", "share"])
def test_a_token_whose_advantage_overflows_the_norm_is_named_with_its_true_norm(strategy, scale):
    found = search_planted("plain", {(3, 5): scale}, strategy=strategy, said=math.inf)
    assert not math.isfinite(found["clipped_from"]), "float32 does not hold this norm"
    assert found["places"] == [(3, 5)]
    assert found["norms"] == pytest.approx([norm_of_one((3, 5)) * scale], rel=1e-4)
    assert found["verdict"] == "explained"
    without = Oracle(build("tiny"), random_batch(build("tiny")).planted({(3, 5): 0.0}), TERMS)
    assert found["norm_after"] == pytest.approx(float(without.gradient().norm()), rel=0.05)
    assert found["cost"] <= 12 * NUM_MICRO_BATCHES


@pytest.mark.parametrize("scale", SCALES)
def test_so_are_several_of_very_different_sizes(scale):
    plants = {(3, 5): scale, (9, 1): -scale / 3, (14, 0): 1e6}
    found = search_planted("plain", plants, said=math.inf)
    assert found["places"][:2] == [(3, 5), (9, 1)] and found["cost"] <= 12 * NUM_MICRO_BATCHES
    assert (found["verdict"] == "explained") == (len(found["places"]) == 3)


def test_so_is_one_beside_another_whose_loss_is_not_finite_at_all():
    found = search_planted("plain", {(3, 5): 1e22, (9, 1): math.inf}, said=math.inf)
    assert found["places"] == [(3, 5), (9, 1)] and found["verdict"] == "explained"
    assert found["cost"] <= 12 * NUM_MICRO_BATCHES


@pytest.mark.parametrize("factor", [1e21, 1e23])
def test_no_token_is_named_of_a_batch_that_is_scaled_as_a_whole(factor):
    healthy = random_batch(build("tiny"), rows=4, length=8, seed=1)
    healthy = healthy.edited(advantages=torch.randn(healthy.advantages.shape, generator=torch.manual_seed(0)))
    loss = replace(TERMS, aggregation="seq-mean-token-sum")  # under which a token's weight does not shrink with length
    step, space = trained(healthy.edited(advantages=healthy.advantages * factor), loss=loss)
    found = localize(step, space, Ranks(), spike_of(healthy, math.inf, 20.0), 1.0)
    assert not found.tokens and found.certificate.verdict == "not_explained"
    typical = {"coefficient": (1.0 / healthy.num_tokens, 3.0)}
    found = localize(step, space, Ranks(), spike_of(healthy, math.inf, 20.0), 1.0, typical=typical)
    assert not found.tokens and found.source.label == "batch_scale"


def test_a_backward_that_is_not_finite_by_itself_is_traced_as_before():
    model = build("tiny")
    batch = random_batch(model)
    model.head.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    step, space = trained(batch, loss=TERMS, model=model)
    assert not math.isfinite(space.norm())
    finding = localize(step, space, Ranks(), spike_of(batch, math.inf, 20.0), 1.0)
    assert not finding.tokens and finding.certificate.verdict == "not_explained"
    assert (finding.num_forwards, finding.num_backwards) == (12, 12), "no pass in another unit"
