# SPDX-License-Identifier: Apache-2.0
"""What a search costs: 8 f for one culprit, the shares alone where a whole batch is loud; and of how many it tells."""

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.core.tracker import NormTracker
from gradloc.search.find import localize
from tests.search import spike_of, trained
from tests.toy_model import Loss, Oracle, build, random_batch

M = 4
THRESHOLD = 4.0  # healthy norms are near 1


def search(batch, threshold=THRESHOLD, dtype=torch.float32, typical=None, num_micro_batches=M, loss=Loss()):  # noqa: B008
    """The finding in one process, with tracked norms, and its cost in f."""
    ranks, tracker = Ranks(), NormTracker(0)
    tracker.begin_mini_batch()
    step, space = trained(batch, dtype, loss, note=tracker.after_backward, num_micro_batches=num_micro_batches)
    increments = tracker.read(space, ranks).increments
    found = localize(step, space, ranks, spike_of(batch, space.norm(), threshold), 1.0, increments, typical)
    return found, found.num_forwards + 2 * found.num_backwards - len(found.entropies)


@pytest.mark.parametrize("advantage", [1e3, 5e4])
def test_one_culprit_costs_two_forwards_and_two_backwards_of_one_micro_batch(advantage):
    found, cost = search(random_batch(build("tiny")).planted({(9, 1): advantage}))
    assert [len(culprit.tokens) for culprit in found.culprits] == [1]
    assert found.certificate.verdict == "explained" and found.certificate.method == "subtract"
    assert cost <= 2 + 3 + 3, "two forwards; the token alone, twice"


def test_few_culprits_are_measured_by_the_backwards_that_the_certificate_takes():
    model, places = build("tiny"), [(1, 2), (5, 1), (9, 1)]
    batch = random_batch(model).planted(dict(zip(places, (3e3, 1e3, 300.0), strict=True)))
    found, cost = search(batch)
    named = {(culprit.start, culprit.micro_batch): culprit for culprit in found.culprits}
    assert len(named) == 3 and all(culprit.is_exact for culprit in found.culprits)
    own = sorted(Oracle(model, batch).norms(places).values())
    assert sorted(culprit.norm for culprit in found.culprits) == pytest.approx(own, rel=1e-3)
    assert found.certificate.verdict == "explained" and found.certificate.method == "subtract"
    assert cost <= 2 * M + 3 * (3 + 1), "shares of all, each token alone, and the loudest once more"


def test_micro_batches_are_read_in_the_order_of_their_norms_as_far_as_the_spike_needs():
    places = [(1, 2), (9, 1)]
    batch = random_batch(build("tiny")).planted(dict(zip(places, (3e3, 1e3), strict=True)))
    found, cost = search(batch, num_micro_batches=8)
    assert len(found.culprits) == 2 and found.certificate.verdict == "explained"
    assert cost <= 2 * 2 + 3 * (2 + 1), "shares of two of eight, each token alone, and the louder once more"


def test_of_two_culprits_that_a_pass_without_them_certifies_both_are_measured():
    model, places = build("tiny"), [(1, 2), (9, 1)]
    batch = random_batch(model).planted(dict(zip(places, (3e3, 1e3), strict=True)))
    found, cost = search(batch, num_micro_batches=2)
    assert found.certificate.method == "recompute" and all(culprit.is_exact for culprit in found.culprits)
    own = sorted(Oracle(model, batch).norms(places).values())
    assert sorted(culprit.norm for culprit in found.culprits) == pytest.approx(own, rel=1e-3)
    assert cost <= 2 * 2 + 3 * 2 + 3, "shares of all, both micro-batches without the culprits, and the quieter alone"


def test_a_neighbourhood_that_the_loss_pulls_is_one_culprit():
    batch = random_batch(build("tiny"))
    row = int(batch.mask.sum(1).argmax())
    found, cost = search(batch.planted({(row, number): 300.0 for number in range(2, 7)}))
    assert [culprit.size for culprit in found.culprits] == [5] and found.certificate.verdict == "explained"
    assert cost <= 2 + 3 + 3


def test_culprits_in_every_micro_batch_are_certified_by_one_pass():
    places = [(1, 2), (5, 1), (9, 1), (13, 2)]
    found, cost = search(random_batch(build("tiny")).planted(dict.fromkeys(places, 1e3)))
    assert len(found.tokens) == 4
    assert found.certificate.verdict == "explained" and found.certificate.method == "recompute"
    assert cost <= 2 * M + 2 + 3 * M, "shares of all, and every micro-batch without the culprits"


def test_a_culprit_beside_louder_ones_is_named_with_no_backward_of_its_own():
    batch, model = random_batch(build("tiny")), build("tiny")
    places = [(row, 1) for row in range(0, 16, 2)]
    own = Oracle(model, batch.planted(dict.fromkeys(places, 1.0))).norms(places)
    sizes = dict.fromkeys(places, 100.0) | {places[-1]: 40.0}
    found, cost = search(batch.planted({at: sizes[at] / own[at] for at in places}), threshold=32.0)
    assert len(found.culprits) == 8 and found.certificate.verdict == "explained"
    assert found.num_backwards <= 2 * M and cost <= 2 * (2 * M + 3 * M), "two rounds at most"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_culprits_of_very_different_size_in_four_micro_batches_are_explained_within_the_limit(dtype):
    model = build("tiny")
    places = [(1, 2), (5, 1), (9, 1), (13, 2), (2, 1), (6, 2), (10, 1)]
    own = Oracle(model, random_batch(model).planted(dict.fromkeys(places, 1.0))).norms(places)
    sizes = [10.0**power for power in (5, 4.5, 4, 3.5, 3, 2.5, 2)]
    found, cost = search(
        random_batch(model).planted({p: size / own[p] for p, size in zip(places, sizes, strict=True)}), dtype=dtype
    )
    assert found.certificate.verdict == "explained"
    assert {random_batch(model).place(token, 1, M) for token in found.tokens} <= set(places)
    assert cost <= 4 * 3 * M, "max_steps' default"


WHOLE = [(64, 1, factor, 0.0) for factor in (4.2, 5.0, 1e3)] + [(12, seed, 100.0, 0.0) for seed in (0, 3, 7)]


@pytest.mark.parametrize(("length", "seed", "factor", "entropy"), [*WHOLE, (12, 3, 1.0, 1e2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loudest_rows_of_a_batch_that_is_too_large_as_a_whole_are_not_named(length, seed, factor, entropy, dtype):
    """By its advantages or by its entropy bonus, without a history."""
    healthy = random_batch(build("tiny"), length=length, seed=seed)
    normal = float(Oracle(build("tiny"), healthy, Loss(entropy=min(entropy, 0.01))).gradient().norm())
    spoiled = healthy.edited(advantages=healthy.advantages * factor)
    found, cost = search(spoiled, 4 * normal, dtype, loss=Loss(entropy=entropy))
    assert found.status == "not_found" and not found.culprits and found.stop_reason.startswith("the spike is spread")
    assert found.certificate.verdict == "not_explained"
    assert found.certificate.norm_after == found.certificate.norm_before
    assert cost <= 4 * 3 * M, "max_steps' default"


@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_where_the_run_has_a_history_half_of_the_rows_may_be_culprits(num_rows):
    healthy = random_batch(build("tiny"), rows=num_rows, length=64, seed=1)
    even = torch.ones_like(healthy.advantages)
    spoiled = even.clone()
    spoiled[: num_rows // 2] = 300.0
    normal = float(Oracle(build("tiny"), healthy.edited(advantages=even)).gradient().norm())
    typical = {"coefficient": (1.0 / healthy.num_tokens, 3.0)}
    found, _ = search(healthy.edited(advantages=spoiled), 4 * normal, typical=typical, num_micro_batches=1)
    rows = {healthy.place(token, 1, 1)[0] for token in found.tokens}
    assert rows == set(range(num_rows // 2)) and found.certificate.verdict == "explained"
    found, _ = search(healthy.edited(advantages=300 * even), 4 * normal, typical=typical, num_micro_batches=1)
    assert found.source.label == "batch_scale" and not found.tokens


@pytest.mark.parametrize("count", [12, 40])
def test_of_many_tokens_that_are_alike_the_most_are_named_and_the_others_counted(count):
    model = build("tiny")
    batch = random_batch(model, length=64, seed=1)
    oracle = Oracle(model, batch)
    size = 3 * float(oracle.gradient().norm())
    places = [tuple(place) for place in batch.mask.nonzero().tolist()[:: batch.num_tokens // count]][:count]
    planted = {place: size / oracle.norm(place) * float(batch.advantages[place]) for place in places}
    found, _ = search(batch.planted(planted), size * 4 / 3)
    named = [batch.place(token, 1, M) for token in found.tokens]
    assert found.status == "max_culprits" and len(named) == 8 and set(named) <= set(places)
    assert 0.5 * (count - 8) <= found.num_more <= count - 8


def with_a_pair(size: float, part: float):
    """A batch with two equal rows in two micro-batches, and the advantages that plant a token of this norm in one and
    its opposite, times ``part``, in the other."""
    model, batch = build("tiny"), random_batch(build("tiny"))
    rows = {name: getattr(batch, name).clone() for name in ("tokens", "labels", "old_log_probs", "mask")}
    for row in rows.values():
        row[13] = row[1]
    batch = batch.edited(**rows)
    one = size * float(batch.advantages[1, 2]) / Oracle(model, batch).norm((1, 2))
    return batch, {(1, 2): one, (13, 2): -part * one}


def test_a_pair_that_cancels_across_micro_batches_is_measured_as_a_whole():
    batch, pair = with_a_pair(40.0, 0.5)
    found, cost = search(batch.planted(pair))
    assert sorted(batch.place(token, 1, M) for token in found.tokens) == [(1, 2), (13, 2)]
    assert found.shares.closure == pytest.approx(1, abs=0.05), "and not the 2 of the louder one alone"
    assert cost <= 3 + 2 + 2 * 3 + 12 + 1, "and a forward that settles the step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_that_cancels_is_named_where_another_token_explains_the_spike(dtype):
    batch, pair = with_a_pair(40.0, 0.999)
    planted = pair | {(6, 1): 20 * float(batch.advantages[6, 1]) / Oracle(build("tiny"), batch).norm((6, 1))}
    found, _ = search(batch.planted(planted), dtype=dtype)
    assert sorted(batch.place(token, 1, M) for token in found.tokens) == sorted(planted)
    assert found.certificate.verdict == "explained"
