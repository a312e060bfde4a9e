# SPDX-License-Identifier: Apache-2.0
"""The bare step agrees with brute force under every sharding, and a search on it finds what was planted."""

from dataclasses import replace

import pytest
import torch

from tests.toy_model import AGGREGATIONS, Oracle, ToyStep, build, random_batch
from tests.toy_model.scenarios import NUM_MICRO_BATCHES, TERMS, search_planted

PLANTS = {(3, 2): 1e4, (13, 1): -9e3}


def oracle_of(aggregation):
    model = build("tiny")
    return Oracle(model, random_batch(model).planted(PLANTS), replace(TERMS, aggregation=aggregation))


@pytest.fixture(scope="module")
def oracle():
    return oracle_of(TERMS.aggregation)


def check(found, oracle):
    whole = oracle.gradient()
    assert found["norm"] == pytest.approx(float(whole.norm()), rel=1e-5)
    assert found["clipped_from"] == pytest.approx(found["norm"], rel=1e-5)
    assert found["norm_clipped"] == pytest.approx(1.0, rel=1e-4)
    assert found["places"] == sorted(PLANTS)
    assert sorted(found["norms"]) == pytest.approx(sorted(oracle.norms(PLANTS).values()), rel=1e-4)
    assert found["verdict"] == "explained"
    without = float((whole - oracle.gradient(PLANTS)).norm())
    assert found["norm_after"] == pytest.approx(without, abs=found["error_bound"] + 1e-6 * found["norm"])
    assert found["restored"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_process_finds_what_was_planted(aggregation):
    check(search_planted("plain", PLANTS, aggregation=aggregation), oracle_of(aggregation))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_two_ranks_find_the_same_under_either_sharding(bare_world, oracle, layout):
    found, other = bare_world.run("tests.toy_model.scenarios.search_planted", layout=layout, plants=PLANTS)
    check(found, oracle)
    assert found == other


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_gathered_weights_are_not_taken_for_the_optimizers(bare_world, layout):
    assert bare_world.run("tests.toy_model.scenarios.params_after_a_forward", layout=layout) == [True, True]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_tokens_gradients_add_up_to_the_step_s(aggregation):
    oracle = oracle_of(aggregation)
    places = [tuple(place) for place in oracle.batch.mask.nonzero().tolist()]
    whole = oracle.gradient()
    close = dict(rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
    torch.testing.assert_close(oracle.gradient(places), whole, **close)
    step = ToyStep(oracle.model, oracle.batch, NUM_MICRO_BATCHES, loss=oracle.loss)
    step.train()
    trained = torch.cat([param.grad.double().flatten() for param in oracle.model.parameters()])
    torch.testing.assert_close(trained, whole, **close)


def test_the_loss_s_own_derivatives_are_what_the_backward_left_and_the_record_stays_without_a_graph():
    model = build("tiny")
    step = ToyStep(model, random_batch(model), NUM_MICRO_BATCHES, loss=TERMS, loss_scale=8.0)
    step.train()
    for found, left in zip(step.coefficients_under(0, {})[:2], step.recorded(0).coefficients(1 / 8), strict=True):
        torch.testing.assert_close(found, left)
    assert not step.recorded(0).log_prob.requires_grad and not step.recorded(0).entropy.requires_grad
