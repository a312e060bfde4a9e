# SPDX-License-Identifier: Apache-2.0
"""Quartiles of the gradient and tried updates on two ranks: right, adding up, and unnoticed."""

import pytest

from tests.analysis.test_split import actor
from tests.trainers import NONE, default_on

RUN = "tests.analysis.quartiles.scenarios."
ENTROPY = actor(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2")


@default_on(verl07=NONE, verl09=("entropy and kl terms",))
@pytest.mark.parametrize(
    "overrides", [actor(), actor(strategy="fsdp"), ENTROPY], ids=["fsdp2", "fsdp1", "entropy and kl terms"]
)
def test_each_quartile_and_token_agrees_with_a_backward_of_every_token_on_a_plain_model(world, dump_dir, overrides):
    for out in world.run(RUN + "split", overrides=overrides, dump_dir=dump_dir):
        record = out["record"]
        assert record["whole"] == pytest.approx(out["whole"], rel=1e-5)
        assert record["norms"] == pytest.approx(out["norms"], rel=1e-5)
        assert record["dots"] == pytest.approx(out["dots"], rel=1e-4)
        assert sum(record["dots"]) == pytest.approx(out["whole"] ** 2, rel=1e-5)
        assert record["closure"] < 1e-5
        found = record["tokens"]
        assert len(found) == 6
        assert [token["loss_norm"] for token in found] == pytest.approx(out["loss_norms"], rel=1e-4)
        assert [token["log_prob_norm"] for token in found] == pytest.approx(out["log_prob_norms"], rel=1e-4)


@default_on(verl07=NONE, verl09=("2-fsdp2",))
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("num_before", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_probability_changes_are_those_of_a_literal_copy_of_model_and_optimizer(world, dump_dir, strategy, num_before):
    for out in world.run(RUN + "updates", overrides=actor(strategy=strategy), dump_dir=dump_dir, num_before=num_before):
        assert out.pop("before") < 1e-5
        for name, found in out.items():
            # without a past, a gradient of zero leaves weight decay alone: next to nothing
            assert found["size"] > (1e-5 if name != "none" or num_before else 0), name
            assert found["error"] < max(0.01, 1e-6 / found["size"]), name
            assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-4)
            assert found["update_norm"][0] == pytest.approx(found["update_norm"][1], rel=1e-2)


def test_a_tried_update_that_fails_is_taken_back(world, dump_dir):
    for out in world.run(RUN + "fail_during_update", dump_dir=dump_dir):
        assert all(out.values()), out


@default_on(verl09=NONE)
def test_a_broken_token_spoils_its_quartile_and_no_other(world, dump_dir):
    out = world.run(RUN + "odd", dump_dir=dump_dir, what="nan advantage")[0]
    norms = out["record"]["norms"]
    assert norms[0] != norms[0] and all(value > 0 for value in norms[1:])
    assert out["record"]["steps"]["lowest"]["is_taken"] is False
    assert out["record"]["steps"]["all"]["is_taken"] is False
    assert out["largest_change"]["lowest"] is out["largest_change"]["all"] is None
    assert out["largest_change"]["highest"] > 0


@default_on(verl07=("all equally probable",), verl09=("fewer than four tokens",))
@pytest.mark.parametrize(
    "what, counts",
    [("ties", None), ("three tokens", [1, 1, 1, 0])],
    ids=["all equally probable", "fewer than four tokens"],
)
def test_an_empty_quartile_is_reported_as_empty(world, dump_dir, what, counts):
    out = world.run(RUN + "odd", dump_dir=dump_dir, what=what)[0]
    if counts is None:
        assert out["counts"][1:] == [0, 0, 0] and out["counts"][0] > 100
    else:
        assert out["counts"] == counts
    for count, value in zip(out["counts"], out["record"]["norms"], strict=True):
        assert (value > 0) == (count > 0)
    assert out["record"]["steps"]["highest"] is None
    assert out["record"]["steps"]["lowest"]["is_taken"]
    assert out["record"]["closure"] < 1e-5


@default_on(verl09=NONE)
def test_a_learning_rate_of_zero_changes_nothing_at_all(world, dump_dir):
    out = world.run(RUN + "odd", dump_dir=dump_dir, what="no step size")[0]
    assert out["record"]["learning_rate"] == 0
    assert set(out["largest_change"].values()) == {0.0} and len(out["largest_change"]) == 4
