# SPDX-License-Identifier: Apache-2.0
"""The default search: no token is verified twice, no more than `max_steps` updates are spent, and all ranks agree."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.search import auto, limit
from gradloc.search.candidates import by_coefficient
from gradloc.search.find import localize
from gradloc.search.task import Span, Task
from tests.bare import Loss, build, random_batch
from tests.bare.scenarios import scatter, useless_shares
from tests.search import spike_of, task_of, trained

M, THRESHOLD = 4, 4.0
PLANTS = {(row, 1 + row % 2): 1e3 for row in range(8)}
PLANTED = {(3, 2): 1e4, (9, 1): 1e4}


def searched(plants=PLANTS, batch=None, parts=None, dtype=torch.float32, noise=None, clip=1.0, **limits):
    batch = (batch or random_batch(build("tiny"))).planted(plants)
    step, space = trained(batch, dtype)
    if noise:
        scatter(step, *noise)
    norm = space.norm()
    increments = parts and [part * norm for part in parts]
    space.scale(clip)
    found = localize(step, space, Ranks(), spike_of(batch, norm, THRESHOLD), clip, increments, **limits)
    return found, found.num_forwards + 2 * found.num_backwards


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


def test_each_candidate_s_own_backward_is_told_in_the_path():
    result = searched(PLANTED)[0]
    verified = [entry for entry in result.path if entry.phase == "verify" and entry.verdict == "culprit"]
    exact = [culprit for culprit in result.culprits if culprit.is_exact]
    assert exact and sorted(entry.norm for entry in verified) == sorted(culprit.norm for culprit in exact)
    assert {(entry.threshold, entry.num_tokens) for entry in verified} == {(exact[0].threshold, 1)}
    assert all("micro-batch" in entry.note for entry in verified)


@pytest.mark.parametrize("strategy", ["auto", "share", "sketch"])
def test_shares_that_are_all_noise_stall_nothing(strategy):
    check_useless(useless_shares("plain", strategy, "float32"))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_it_is_on_two_ranks_and_they_agree(bare_world, dtype):
    found, other = bare_world.run("tests.bare.scenarios.useless_shares", layout="fsdp2", strategy="auto", dtype=dtype)
    check_useless(found)
    assert found == other


def check_useless(found):
    assert found["cost"] <= 3 * M * 4, "max_steps' default"
    assert found["restored"] and found["verdict"] in ("not_explained", "undecided", "explained")
    assert set(found["places"]) <= set(found["planted"]), "what is named was measured by a backward of its own"
    assert torch.tensor(found["norm_after"]).isfinite()


def two_planted(plants=PLANTED):
    """A search of a step with these culprits, and its task."""
    made, _ = task_of(plants)
    return auto._AutoSearch(made), made


def test_what_a_micro_batch_lacks_is_looked_for_in_the_others_before_it_is_read_again():
    batch = random_batch(build("tiny"))
    place, alike = (5, 2), (9, 2)
    for field in fields(batch):
        if isinstance(rows := getattr(batch, field.name), torch.Tensor):
            rows[alike[0]] = rows[place[0]]  # two tokens along one direction, in two micro-batches
    found, _ = searched({place: 1e4, alike: 4e3}, batch, parts=[0.0, 10 / 14, 4 / 14, 0.0])
    first, second = [entry for entry in found.path if entry.phase == "share"][:2]
    assert "micro-batches [1] alone" in first.note and first.verdict == "untrusted"
    assert "micro-batches [1, 2] alone" in second.note and second.verdict == "measured"
    assert found.certificate.verdict == "explained" and len(found.culprits) == 2


def test_what_is_left_by_the_culprits_own_gradients_is_searched_along_its_own_direction():
    healthy = random_batch(build("tiny"))
    found, _ = searched({(3, 2): 1e3}, healthy.edited(advantages=8 * healthy.advantages))
    path = found.path
    (at,) = [i for i, entry in enumerate(path) if entry.note.startswith("without the culprits' own gradients")]
    assert [entry.verdict for entry in path[: at + 3]] == ["measured", "culprit", "measured", "untrusted", "measured"]
    assert path[at + 1].norm == path[at + 2].norm == pytest.approx(path[at].norm, rel=1e-5)
    assert "all micro-batches add up to 1.0" in path[at + 2].note
    last, _ = searched({(3, 2): 1e3}, healthy.edited(advantages=8 * healthy.advantages), max_culprits=1)
    assert [entry.verdict for entry in last.path[:3]] == ["measured", "culprit", "not_explained"], "no next round"


def loud_as_a_whole(seed, scale=1.0, entropy=0.0):
    """A search of a batch whose advantages, or whose entropy bonus, are far too large, without a history."""
    batch = random_batch(build("tiny"), seed=seed)
    healthy = trained(batch, loss=Loss(entropy=min(entropy, 0.01)))[1].norm()
    step, space = trained(batch.edited(advantages=scale * batch.advantages), loss=Loss(entropy=entropy))
    return localize(step, space, Ranks(), spike_of(batch, space.norm(), THRESHOLD * healthy), 1.0, max_steps=4)


@pytest.mark.parametrize(
    "given", [*({"seed": seed, "scale": 100.0} for seed in (0, 3, 7)), {"seed": 3, "entropy": 1e2}]
)
def test_the_loudest_of_a_batch_that_is_too_large_as_a_whole_are_no_culprits(given):
    found = loud_as_a_whole(**given)
    assert found.culprits == [] and found.stop_reason.startswith("the spike is spread")
    assert (
        found.certificate.verdict == "not_explained" and found.certificate.norm_after == found.certificate.norm_before
    )


def test_where_no_more_may_be_named_and_the_limit_is_spent_no_more_is_counted():
    found, _ = searched({(3, 2): 1e4, (9, 1): 1e4, (13, 2): 1e4}, max_culprits=1, max_steps=2)
    assert found.status == "max_culprits" and found.num_more == 0 and found.more_norm is None
    assert found.stop_reason == "search.max_culprits=1 are named"
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


def span_of(bound, micro_batch=0, start=0, end=1):
    return Span(bound, "token" if end - start == 1 else "sequence", micro_batch, 0, start, end)


def culprit_of(norm, micro_batch, index):
    return Span(norm, "token", micro_batch, 0, index, index + 1, is_exact=True, threshold=1.0)


@pytest.mark.parametrize(("most", "num_more", "status"), [(2, 1, "max_culprits"), (3, 0, "found")])
def test_of_tokens_that_are_not_finite_those_beyond_the_most_are_counted(most, num_more, status):
    found, _ = searched(dict.fromkeys([(3, 2), (9, 1), (13, 2)], math.nan), max_culprits=most)
    assert (len(found.tokens), found.num_more, found.status) == (most, num_more, status)


# ---- what is named


def test_a_sequence_takes_the_place_of_its_tokens_and_no_token_is_named_twice(monkeypatch):
    search, made = two_planted()
    monkeypatch.setattr(Task, "can_afford", lambda self, backwards: False)  # all are taken at their bound
    search.norm = made.spike.grad_norm
    token, sequence = span_of(99.0, 2, 1, 2), span_of(99.0, 2, 0, 6)
    assert search.name([token]) and not search.name([token])
    assert search.name([sequence]) and [culprit.tokens for culprit in search.result.culprits] == [sequence.tokens]
    assert not search.name([token]), "it is in the sequence"


def test_a_backward_is_kept_for_each_hint_that_is_still_to_come(monkeypatch):
    search, made = two_planted()
    search.norm, asked = made.spike.grad_norm, []
    monkeypatch.setattr(Task, "can_afford", lambda self, backwards: asked.append(backwards))
    solid = [span_of(99.0, 2, 0, 3), span_of(99.0, 1, 0, 3)]
    search.name([span_of(0.0, 0), *solid, span_of(0.0, 0, 1, 2)])
    assert asked == [1, 2, 2, 1]
    assert [(culprit.norm, culprit.is_exact) for culprit in search.result.culprits] == [(99.0, False)] * 2


def test_a_hint_whose_own_gradient_is_small_is_no_culprit():
    search, made = two_planted()
    search.norm = made.spike.grad_norm
    assert not search.name([span_of(0.0, 1)]) and search.result.path[-1].verdict == "under"
    assert search.result.path[-1].note.endswith("by its coefficient")


@pytest.mark.parametrize(
    ("num_more", "verdict", "is_cut"),
    [(-1, "not_explained", False), (0, "explained", False), (0, "not_explained", True), (2, "explained", True)],
)
def test_the_most_culprits_end_a_search_where_more_are_left_or_the_rest_spikes(num_more, verdict, is_cut):
    search, _ = two_planted()
    search.result.certificate = SimpleNamespace(verdict=verdict)
    search.cut(num_more, 7.0)
    assert search.result.is_cut is is_cut and search.result.more_norm == (7.0 if num_more > 0 else None)
    assert search.result.stop_reason.endswith("at least 2 more are left") is (num_more == 2)


def test_a_sum_with_a_part_that_was_not_measured_alone_is_given_up():
    search, made = two_planted()
    search.norm = made.spike.grad_norm
    first, second = by_coefficient(made, 2, set())
    assert search.name([first]) and search.name([second]) and search.alone is not None
    assert search.prober.space.norm(search.alone.gradient) == pytest.approx(made.spike.grad_norm, rel=0.1)
    assert search.alone.square == pytest.approx(sum(culprit.norm**2 for culprit in search.result.culprits))
    assert search.name([replace(first, norm=99.0, span="segment", start=0)]) and search.alone is None


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
    step.numerics = replace(step.numerics, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for grad in space.current():
        grad += 0.7 * grad.norm() / grad.numel() ** 0.5 * torch.randn_like(grad)
    found = localize(step, space, Ranks(), spike_of(batch, space.norm(), THRESHOLD), 1.0)
    assert sorted(batch.place(token, 1, M) for token in found.tokens) == sorted(PLANTS)
    assert found.certificate.verdict == "explained" and found.num_forwards + 2 * found.num_backwards <= 4 * 3 * M
