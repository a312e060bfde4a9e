# SPDX-License-Identifier: Apache-2.0
"""A norm that only its coefficients' size made infinite is searched like any other, and told in training's own unit."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.record import Certificate, PathEntry
from gradloc.search.find import localize
from gradloc.search.overflow import in_training_unit, rescaled
from gradloc.search.share import ShareMap
from gradloc.search.task import SearchResult, Span
from tests.bare import Oracle, build, random_batch
from tests.bare.scenarios import NUM_MICRO_BATCHES, TERMS, search_planted
from tests.search import spike_of, task_of, trained

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


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_so_is_one_of_either_rank_s(bare_world, layout):
    found, other = bare_world.run(
        "tests.bare.scenarios.search_planted", layout=layout, plants={(3, 5): 1e22}, said=math.inf
    )
    assert found == other
    assert found["places"] == [(3, 5)] and found["verdict"] == "explained" and found["restored"]


def test_a_backward_that_is_not_finite_by_itself_is_traced_as_before():
    model = build("tiny")
    batch = random_batch(model)
    model.head.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    step, space = trained(batch, loss=TERMS, model=model)
    assert not math.isfinite(space.norm())
    finding = localize(step, space, Ranks(), spike_of(batch, math.inf, 20.0), 1.0)
    assert not finding.tokens and finding.certificate.verdict == "not_explained"
    assert (finding.num_forwards, finding.num_backwards) == (12, 12), "no pass in another unit"


def test_in_the_other_unit_the_spike_is_held_against_the_same_threshold():
    task, _ = task_of({(3, 5): 1e22})
    found = rescaled(task)
    assert math.isfinite(found.spike.grad_norm) and found.unit > 1
    assert (found.spike.threshold * found.unit, found.tau * found.unit) == (task.spike.threshold, task.tau)


@pytest.mark.parametrize("norm_after", [0.5, math.inf])
def test_in_training_s_unit_norms_are_so_many_times_as_large_and_squares_the_square_of_that(norm_after):
    units, one, culprit = [], torch.tensor([[1.0, 2.0]]), Span(2.0, "token", 0, 0, 0, 1, threshold=0.5)
    task = SimpleNamespace(
        unit=4.0,
        prober=SimpleNamespace(step=SimpleNamespace(rescale=units.append)),
        original=SimpleNamespace(spike=SimpleNamespace(threshold=20.0)),
    )
    shares = ShareMap([one], [one / 2], 9.0, 1.0, 0.0, 0.0, True, 2, 0.1)
    path = [PathEntry("verify", norm=2.0, threshold=0.5), PathEntry("share", norm=3.0)]
    certificate = Certificate(3.0, norm_after, 0.25, 5.0, "swap", "explained", "", replay_difference=0.125)
    given = [culprit, replace(culprit, squares=torch.tensor([1.0, 3.0]))]
    found = in_training_unit(task, SearchResult(given, path, more_norm=3.0, shares=shares, certificate=certificate))
    assert units == [1.0] and found.more_norm == 12.0
    assert [(each.norm, each.threshold) for each in found.culprits] == [(8.0, 2.0)] * 2
    assert found.culprits[0].squares is None and found.culprits[1].squares.tolist() == [16.0, 48.0]
    assert [(entry.norm, entry.threshold) for entry in found.path] == [(8.0, 2.0), (12.0, None)]
    assert torch.equal(found.shares.products[0], 16 * one) and torch.equal(found.shares.errors[0], 8 * one)
    assert found.shares.square == 144.0 and torch.equal(found.shares.shares(0), shares.shares(0))
    if norm_after < math.inf:
        assert (found.certificate.norm_after, found.certificate.error_bound) == (2.0, 1.0)
        assert (found.certificate.replay_difference, found.certificate.threshold) == (0.5, 20.0)
    else:
        assert found.certificate is certificate
