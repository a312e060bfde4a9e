# SPDX-License-Identifier: Apache-2.0
"""The default search: no token is verified twice, no more than `max_steps` updates are spent, and all ranks agree."""

import math
from dataclasses import fields, replace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.search import auto, limit
from gradloc.search.find import localize
from gradloc.search.share import ShareMap
from gradloc.search.task import Span
from tests.search import spike_of, task_of, trained
from tests.toy_model import Loss, ToyStep, build, random_batch
from tests.toy_model.events import event_of
from tests.toy_model.scenarios import useless_shares

M, THRESHOLD = 4, 4.0
PLANTS = {(row, 1 + row % 2): 1e3 for row in range(8)}
PLANTED = {(3, 2): 1e4, (9, 1): 1e4}


def searched(plants=PLANTS, batch=None, parts=None, dtype=torch.float32, clip=1.0, **limits):
    batch = (batch or random_batch(build("tiny"))).planted(plants)
    step, space = trained(batch, dtype)
    norm = space.norm()
    increments = parts and [part * norm for part in parts]
    space.scale(clip)
    found = localize(step, space, Ranks(), spike_of(batch, norm, THRESHOLD), clip, increments, **limits)
    return found, found.num_forwards + 2 * found.num_backwards


def name(task, products, is_exact=True, norms=None):
    """What one round names, and its path, of the first tokens of the second micro-batch with these shares of R."""
    search = auto._AutoSearch(task)
    masks = [task.prober.step.token_mask(index) for index in range(task.prober.step.num_micro_batches)]
    values = [torch.zeros(mask.shape, dtype=torch.float64) for mask in masks]
    places = masks[0].nonzero()[: len(products)].tolist()
    for (row, position), product in zip(places, products, strict=True):
        values[0][row, position] = product * task.square
    nothing = [torch.zeros_like(each) for each in values]
    shares = ShareMap(values, nothing, task.square, 1.0, 0.0, 0.0, is_exact, 99, 1.0)
    norms = norms or [abs(product) * task.square**0.5 for product in products]
    spans = [Span(norm, "token", 0, 0, n, n + 1, threshold=task.culprit_norm) for n, norm in enumerate(norms)]
    search._name(spans, shares)
    return [span.start for span in search.result.culprits], [entry.phase for entry in search.result.path]


def test_where_shares_prove_nothing_a_backward_that_accounts_for_the_spike_is_the_last():
    task, batch = task_of({(0, 0): 1e4})
    task = replace(task, square=task.spike.grad_norm**2)
    assert name(task, [0.4, 0.3, 0.3], is_exact=False) == ([0], ["verify"])


@pytest.mark.parametrize("max_steps", [1.5, 2, 4])
def test_what_it_costs_stays_within_so_many_updates(max_steps):
    found, cost = searched(max_steps=max_steps)
    assert cost <= 3 * M * max_steps
    if found.status == "budget_exhausted":
        assert found.stop_reason.endswith(f"what search.max_steps={max_steps:g} allows is spent")
    assert (max_steps == 1.5) == (found.certificate.verdict != "explained")


def test_time_counts_as_passes_do_but_on_a_toy_model(monkeypatch):
    assert searched(update_seconds=1e-6)[0].status == "found"
    monkeypatch.setattr(limit, "_LEAST_SECONDS", 0.0)
    found, cost = searched(update_seconds=1e-6)
    assert found.status == "budget_exhausted" and found.culprits == [] and cost == 0
    assert searched(update_seconds=60.0)[0].status == "found"


def test_the_published_search_alone_has_the_published_budget():
    found, _ = searched(strategy="bisect", budget=7)
    assert found.stop_reason == "the budget of 7 probes was used up"
    assert searched(strategy="auto", budget=1)[0].status == "found"


def test_a_masked_norm_is_certified_though_the_limit_is_spent():
    found, _ = searched({(3, 2): 1e4}, max_steps=1)
    assert found.certificate.verdict in ("explained", "not_explained")


@pytest.mark.parametrize("strategy", ["auto", "share"])
def test_shares_that_are_all_noise_stall_nothing(strategy):
    check_useless(useless_shares("plain", strategy, "float32"))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_it_is_on_two_ranks_and_they_agree(bare_world, dtype):
    found, other = bare_world.run(
        "tests.toy_model.scenarios.useless_shares", layout="fsdp2", strategy="auto", dtype=dtype
    )
    check_useless(found)
    assert found == other


def check_useless(found):
    assert found["cost"] <= 3 * M * 4, "max_steps' default"
    assert found["restored"] and found["verdict"] in ("not_explained", "undecided", "explained")
    assert set(found["places"]) <= set(found["planted"]), "what is named was measured by a backward of its own"
    assert torch.tensor(found["norm_after"]).isfinite()


def test_what_a_micro_batch_lacks_is_looked_for_in_the_others_before_it_is_read_again():
    batch = random_batch(build("tiny"))
    place, alike = (5, 2), (9, 2)
    for field in fields(batch):
        if isinstance(rows := getattr(batch, field.name), torch.Tensor):
            rows[alike[0]] = rows[place[0]]  # two tokens along one direction, in two micro-batches
    found, _ = searched({place: 1e4, alike: 4e3}, batch, parts=[0.0, 10 / 14, 4 / 14, 0.0])
    first, second = [entry for entry in found.path if entry.phase == "share"][:2]
    assert "micro-batches [1] alone" in first.note and first.verdict == "measured"
    assert "micro-batches [1, 2] alone" in second.note and second.verdict == "measured"
    assert found.certificate.verdict == "explained" and len(found.culprits) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plants", [{}, {(6, 1): 1e4}])
def test_where_the_entropy_pulls_too_much_a_row_with_an_odd_advantage_makes_no_other_token_a_culprit(plants, seed):
    """A history of coefficients shows the odd row, and nothing of what the entropy does to the others."""
    healthy = random_batch(build("tiny"), seed=seed)
    batch = healthy.planted({(3, position): 5.0 for position in range(healthy.labels.shape[1])} | plants)
    step = ToyStep(build("tiny"), batch, M, loss=Loss(entropy=300.0))
    typical = {"coefficient": (1.0 / batch.num_tokens, 3.0)}
    event = event_of(step, batch, THRESHOLD * trained(healthy)[1].norm(), typical=typical)
    assert [(culprit.row, *culprit.positions) for culprit in event.culprits] == list(plants)
    assert event.cause.label == ("extreme_advantage" if plants else "entropy_term")


def test_where_no_more_may_be_named_the_others_are_counted():
    found, cost = searched({(3, 2): 1e4, (9, 1): 1e4, (13, 2): 1e4}, max_culprits=1, max_steps=2)
    assert found.status == "max_culprits" and found.num_more == 2 and found.more_norm > THRESHOLD
    assert found.stop_reason == "search.max_culprits=1 are named, and at least 2 more are left" and cost <= 2 * 3 * M
    assert found.certificate.verdict == "not_explained"


@pytest.mark.parametrize(
    ("plants", "factor"), [({(3, 2): 1e4}, 1.0), ({(3, 2): 1e6}, 1.0), ({(3, 2): 1e3}, 8.0), (PLANTS, 1.0)]
)
def test_what_clipping_left_of_the_gradient_changes_nothing_that_is_found(plants, factor):
    healthy, told = random_batch(build("tiny")), []
    for clip in (1.0, 0.25):  # a power of two rounds nothing
        found, cost = searched(plants, healthy.edited(advantages=factor * healthy.advantages), clip=clip)
        culprits = [(culprit.tokens, culprit.norm, culprit.share) for culprit in found.culprits]
        told.append((culprits, found.path, found.certificate, cost))
    assert told[0] == told[1] and told[0][0]


@pytest.mark.parametrize(("most", "num_more", "status"), [(2, 1, "max_culprits"), (3, 0, "found")])
def test_of_tokens_that_are_not_finite_those_beyond_the_most_are_counted(most, num_more, status):
    found, _ = searched(dict.fromkeys([(3, 2), (9, 1), (13, 2)], math.nan), max_culprits=most)
    assert (len(found.tokens), found.num_more, found.status) == (most, num_more, status)


# ---- what is named


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_a_culprit_without_a_backward_of_its_own_is_measured_by_what_the_certificate_leaves(clip):
    task, _ = task_of({(3, 2): 1e6})
    space = task.prober.space
    space.put(task.gradient)
    space.scale(clip)
    found = auto.auto(replace(task, gradient=space.take(), scale=clip))
    (culprit,) = found.culprits
    assert [entry.phase for entry in found.path] == ["share", "residual"] and culprit.is_exact
    assert found.path[0].norm == pytest.approx(task.spike.grad_norm)
    task.prober.compute_only(culprit.tokens, [culprit.micro_batch])
    assert culprit.norm == pytest.approx(space.norm(), rel=1e-6)


def test_a_gradient_that_half_precision_has_turned_changes_the_order_of_no_share():
    """As half precision turns a gradient: the shares along it add up to something else, and still name the truth."""
    batch = random_batch(build("tiny")).planted(PLANTS)
    step, space = trained(batch)
    step.dtype = torch.bfloat16
    torch.manual_seed(0)
    for grad in space.current():
        grad += 0.7 * grad.norm() / grad.numel() ** 0.5 * torch.randn_like(grad)
    found = localize(step, space, Ranks(), spike_of(batch, space.norm(), THRESHOLD), 1.0)
    assert sorted(batch.place(token, 1, M) for token in found.tokens) == sorted(PLANTS)
    assert found.certificate.verdict == "explained" and found.num_forwards + 2 * found.num_backwards <= 4 * 3 * M
