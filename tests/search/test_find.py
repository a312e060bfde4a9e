# SPDX-License-Identifier: Apache-2.0
"""Whoever is over the threshold is named, and nobody under a tenth of it: in mixtures, and in bfloat16 throughout.
What a search may cost, and how it ends."""

import math

import pytest
import torch

from gradloc.core.ranks import PeerFailure, Ranks
from gradloc.search.candidates import find_by_coefficient
from gradloc.search.find import localize
from tests.search import spike_of, trained
from tests.search import task_of as a_step
from tests.toy_model import build, random_batch
from tests.toy_model.mixtures import mixture, problems
from tests.toy_model.scenarios import search_planted


@pytest.mark.parametrize("seed", range(3))
def test_in_a_mixture_the_loud_are_named_and_nobody_else(seed):
    assert not problems(mixture(seed))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [("float32", 3), *(pytest.param("bfloat16", s, marks=[pytest.mark.slow] * (s != 3)) for s in range(10))],
)
def test_so_it_is_on_two_ranks(bare_world, dtype, seed):
    told, other = bare_world.run("tests.toy_model.mixtures.mixture", seed=seed, layout="fsdp2", dtype=dtype)
    assert told == other and not problems(told)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("seed", range(30))
def test_a_mixture_s_loud_tokens_are_named_on_two_ranks(bare_world, layout, seed):
    found, other = bare_world.run("tests.toy_model.mixtures.mixture", seed=seed, layout=layout)
    assert found == other and not problems(found)


CASES = {
    "single": {(3, 2): 1e4},
    "three": {(3, 2): 1e4, (9, 1): -8e3, (14, 0): 9e3},
    "two that cancel each other": {(5, 1): 3e4, (5, 2): -3e4},
}


HALF = {"dtype": "bfloat16", "masters": "bfloat16"}
HOW = {
    "float32, of which the norm overflows": ({(3, 5): 1e22}, {"said": math.inf}),
    "bfloat16 where a kernel takes no float32": (CASES["three"], {"dtype": "bfloat16", "refuses": True}),
    "bfloat16 throughout": (CASES["three"], HALF),
}


def check(found, plants):
    assert found["places"] == sorted(plants)
    assert found["verdict"] == "explained"
    assert found["restored"]


@pytest.mark.parametrize("plants", list(CASES.values())[:2], ids=list(CASES)[:2])
def test_they_are_named_in_half_precision_alone_where_a_kernel_takes_no_float32(plants):
    check(search_planted("plain", plants, refuses=True, **HALF), plants)


@pytest.mark.parametrize("plants", CASES.values(), ids=CASES)
def test_culprits_are_named_where_even_weights_and_gradients_are_in_half_precision(plants):
    check(search_planted("plain", plants, **HALF), plants)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(("plants", "how"), HOW.values(), ids=HOW)
def test_so_are_they_on_two_ranks_that_find_the_same(bare_world, layout, plants, how):
    given = {"layout": layout, "plants": plants, **how}
    found, other = bare_world.run("tests.toy_model.scenarios.search_planted", **given)
    check(found, plants)
    assert found == other


# ---- what it may cost, and how it ends


@pytest.mark.parametrize("strategy", ["auto", "bisect"])
def test_after_a_search_random_numbers_go_on_as_if_nobody_had_looked(strategy):
    made, _ = a_step({(3, 2): 1e4})
    made.prober.space.put(made.gradient)
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    found = localize(made.prober.step, made.prober.space, Ranks(), made.spike, 1.0, strategy=strategy)
    assert found.num_backwards and torch.equal(torch.rand(3), wanted)
    assert strategy != "bisect" or found.num_forwards == found.num_backwards, "no forward alone"


def test_no_gathered_weights_outlive_a_search_that_fails_late(monkeypatch):
    batch, calls = random_batch(build("tiny")).planted({(3, 2): 1e4}), []
    step, space = trained(batch)

    def fail(*_):
        calls.clear()
        raise PeerFailure("a rank had no memory")

    monkeypatch.setattr("gradloc.search.find.try_cures", fail)
    monkeypatch.setattr(space, "reshard", lambda: calls.append("reshard"))
    norm = space.norm()
    with pytest.raises(PeerFailure):
        localize(step, space, Ranks(), spike_of(batch, norm, 20.0), 1.0)
    assert calls == ["reshard"] and space.norm() == norm


def test_a_culprit_without_a_backward_of_its_own_is_subtracted_all_the_same():
    made, _ = a_step({(3, 2): 300.0})
    ((culprit,),) = (candidate.tokens for candidate in find_by_coefficient(made, 1, (), made.culprit_norm))
    made.prober.space.clear()
    found = made.certify([culprit])
    made.prober.compute_without([culprit])
    assert found.method == "subtract" and found.norm_after == pytest.approx(made.prober.space.norm(), rel=1e-4)
