# SPDX-License-Identifier: Apache-2.0
"""Whoever is over the threshold is named, and nobody under a tenth of it: in mixtures, and in bfloat16 throughout.
What a search may cost, and how it ends."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.mixtures import LAYOUTS, markdown, measure
from gradloc.core.ranks import PeerFailure, Ranks
from gradloc.core.trigger import Spike
from gradloc.search.candidates import by_coefficient
from gradloc.search.find import _rehearsal_tau, _with_unlikely, localize
from gradloc.search.limit import Limit
from gradloc.search.task import SearchResult, Span, Task
from tests.bare import Loss, build, random_batch
from tests.bare.mixtures import mixture, problems
from tests.bare.scenarios import search_planted
from tests.search import spike_of, trained
from tests.search import task_of as a_step


@pytest.mark.parametrize("seed", range(3))
def test_in_a_mixture_the_loud_are_named_and_nobody_else(seed):
    assert not problems(mixture(seed))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [("float32", 3), *(pytest.param("bfloat16", s, marks=[pytest.mark.slow] * (s != 3)) for s in range(10))],
)
def test_so_it_is_on_two_ranks(bare_world, dtype, seed):
    told, other = bare_world.run("tests.bare.mixtures.mixture", seed=seed, layout="fsdp2", dtype=dtype)
    assert told == other and not problems(told)


@pytest.mark.slow
def test_so_it_is_in_thirty_mixtures_on_two_ranks():
    rows = measure(30, LAYOUTS)
    print(markdown(rows))
    assert not [(row, problems(row)) for row in rows if problems(row)]


CASES = {
    "single": {(3, 2): 1e4},
    "three": {(3, 2): 1e4, (9, 1): -8e3, (14, 0): 9e3},
    "two that cancel each other": {(5, 1): 3e4, (5, 2): -3e4},
}


def check(found, plants):
    assert found["places"] == sorted(plants)
    assert found["verdict"] == "explained"
    assert found["restored"]


@pytest.mark.parametrize("plants", list(CASES.values())[:2], ids=list(CASES)[:2])
def test_they_are_named_in_half_precision_alone_where_a_kernel_takes_no_float32(plants):
    found = search_planted("plain", plants, "bfloat16", masters="bfloat16", refuses=True)
    assert found["places"] == sorted(plants) and found["verdict"] == "explained" and found["restored"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_so_are_they_on_two_ranks_that_both_hear_of_it(bare_world, layout):
    given = {"layout": layout, "plants": CASES["three"], "dtype": "bfloat16", "refuses": True}
    found, other = bare_world.run("tests.bare.scenarios.search_planted", **given)
    assert found["places"] == other["places"] == sorted(CASES["three"]) and found["verdict"] == "explained"
    assert found["restored"] and other["restored"] and found["cost"] == other["cost"]


@pytest.mark.parametrize("plants", CASES.values(), ids=CASES)
def test_culprits_are_named_where_even_weights_and_gradients_are_in_half_precision(plants):
    check(search_planted("plain", plants, "bfloat16", masters="bfloat16"), plants)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_so_are_they_where_these_are_sharded(bare_world, layout):
    plants = CASES["three"]
    where = {"layout": layout, "plants": plants, "dtype": "bfloat16", "masters": "bfloat16"}
    found, other = bare_world.run("tests.bare.scenarios.search_planted", **where)
    check(found, plants)
    assert found == other


# ---- what it may cost, and how it ends


def prober_of(cost=5, num_micro_batches=4):
    step = SimpleNamespace(num_micro_batches=num_micro_batches)
    return SimpleNamespace(cost=cost, ranks=Ranks(), step=step)


@pytest.mark.parametrize(
    ("num_micro_batches", "limit", "left"),
    [
        (4, {"max_steps": 4}, 48 - 5 - 12),
        (4, {"max_steps": 1.5}, 18 - 5 - 12),
        (2, {"max_steps": 4}, 40 - 5 - 12),  # an update counts as ten at least
        (4, {"max_steps": 4, "update_seconds": 10.0}, 48 - 24 - 12),  # 20 of 10 seconds an update
        (4, {"max_steps": 4, "update_seconds": 1e3}, 48 - 5 - 12),
        (4, {"max_steps": 4, "update_seconds": 0.5}, 48 - 120 - 12),  # an update counts as two seconds at least
        (4, {"max_steps": 4, "budget": 7}, 21 - 5),
        (16, {"max_steps": 4, "budget": 7}, 21 - 5),
        (32, {"max_steps": 4, "budget": 7, "update_seconds": 1e-3}, 42 - 14),  # 20 of the minute that it has at least
        (16, {"max_steps": 4, "budget": 128, "update_seconds": 300.0}, 384 - 384 * 20 / 1200),
        (16, {"max_steps": 4, "budget": 128, "update_seconds": 5.0}, 0),  # after a minute, see below
    ],
)
def test_what_is_left_of_a_limit(monkeypatch, num_micro_batches, limit, left):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    made = Limit(num_micro_batches, **limit)
    now[0] += 60.0 if left == 0 else 20.0
    assert made.left(prober_of(), 12) == pytest.approx(left)
    assert left or made.words == "what search.max_steps=4 allows is spent"


def task_of(limit=None, increments=None, threshold=4.0, num_micro_batches=4, cost=5):
    spike = Spike("fixed", 9.0, threshold, 1.0, 10)
    limit = limit or Limit(num_micro_batches, 4)
    return Task(prober_of(cost, num_micro_batches), [], 1.0, spike, 1.0, 8, limit, increments)


def test_a_pass_is_kept_for_the_certificate_and_a_backward_counts_with_its_forward():
    task = task_of()  # 48, of which 5 are spent and 12 are the certificate's
    assert task.can_afford(forwards=31) and not task.can_afford(forwards=32)
    assert task.can_afford(forwards=1, backwards=10) and not task.can_afford(forwards=2, backwards=10)
    assert task.can_afford(forwards=43, is_certificate=True) and not task.can_afford(forwards=44, is_certificate=True)
    assert task.affordable_forwards == 31 and task_of(cost=60).affordable_forwards == 0
    assert task_of(Limit(4, math.inf)).affordable_forwards == 10**9


def test_what_is_named_has_no_coefficient_any_more():
    made, _ = a_step({}, loss=Loss(entropy=0.1))
    mask, token = made.prober.step.token_mask(1), Span(0.0, "token", 1, 0, 3, 4)
    for left, whole in zip(made.coefficients([token])[1], made.coefficients([])[1], strict=True):
        assert left[mask][3] == 0.0 != whole[mask][3] and int((left != whole).sum()) == 1


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


@pytest.mark.parametrize(
    ("increments", "suspects"),
    [(None, [0, 1, 2, 3]), ([0.1, 0.9, 0.5, 0.2], [1, 2, 3, 0]), ([0.1, 1.0, 5.0, 0.99], [2, 1])],
)
def test_micro_batches_with_a_culprit_s_norm_are_suspect_or_else_all(increments, suspects):
    assert task_of(increments=increments).suspects() == suspects


def test_a_culprit_has_a_quarter_of_the_norm_that_counts_as_a_spike():
    assert task_of().culprit_norm == 1.0 and task_of(threshold=None).culprit_norm == 2.25


@pytest.mark.parametrize(
    ("log_prob", "coefficient", "is_value", "is_asked"),
    [
        (-4.61, -1.0, False, True),
        (-4.60, -1.0, False, False),  # one in a hundred
        (-9.0, 0.5, False, False),
        (-9.0, -1.0, True, False),
    ],
)
def test_an_unlikely_culprit_that_is_made_likelier_is_worth_a_forward(log_prob, coefficient, is_value, is_asked):
    step = SimpleNamespace(
        recorded=lambda index: SimpleNamespace(log_prob=torch.tensor([[0.0, log_prob]]), is_value=is_value),
        token_mask=lambda index: torch.tensor([[False, True]]),
        coefficients=lambda index: (torch.tensor([[0.0, coefficient]]), None),
    )
    culprit = Span(1.0, "token", 3, 0, 0, 1)
    assert _with_unlikely(SearchResult([culprit]), step, Ranks()) == ([3] if is_asked else [])
    other = Span(1.0, "token", 3, 1, 0, 1)
    assert _with_unlikely(SearchResult([other]), step, Ranks()) == _with_unlikely(SearchResult(), step, Ranks()) == []


@pytest.mark.parametrize(
    ("known", "status"),
    [
        ({}, "not_found"),
        ({"culprits": [None]}, "found"),
        ({"culprits": [None], "is_cut": True}, "max_culprits"),
        ({"culprits": [None], "is_cut": True, "exhausted": True}, "budget_exhausted"),
    ],
)
def test_a_search_ends_in_one_of_four_ways(known, status):
    assert SearchResult(**known).status == status


@pytest.mark.parametrize(("weights", "tau"), [([3.0, 4.0], 0.5 * 9.0 / 5.0), ([0.0, 0.0], 1.0)])
def test_a_rehearsal_s_threshold_is_half_the_norm_by_weight(weights, tau):
    spike = Spike("forced", 9.0, None, None, 10)
    step = SimpleNamespace(num_micro_batches=2, token_weights=lambda index: torch.tensor([[weights[index]]]))
    assert _rehearsal_tau(spike, step, Ranks()) == pytest.approx(tau)


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
    ((culprit,),) = (candidate.tokens for candidate in by_coefficient(made, 1, set()))
    made.prober.space.clear()
    found = made.certify([culprit])
    made.prober.compute_without([culprit])
    assert found.method == "subtract" and found.norm_after == pytest.approx(made.prober.space.norm(), rel=1e-4)
