# SPDX-License-Identifier: Apache-2.0
"""The default search: no token is verified twice, no more than `max_steps` updates are spent, and all ranks agree."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.core.selection import Token
from gradloc.record import PathEntry
from gradloc.search import auto, limit
from gradloc.search.candidates import by_coefficient
from gradloc.search.find import localize
from gradloc.search.share import ShareMap
from gradloc.search.task import SearchResult, Span, Task
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


def test_a_token_that_the_shares_have_weighed_is_no_hint_as_well(monkeypatch):
    search, found = two_planted()
    shares = search._measure_of(range(M))
    loudest, second = by_coefficient(found, 2, set())
    weighed = replace(loudest, is_weighed=True)
    monkeypatch.setattr(search, "_spans", lambda shares: [weighed])
    with_hints = search._candidates(shares, with_hints=True)
    assert [candidate.tokens for candidate in with_hints] == [loudest.tokens, second.tokens]
    assert search._candidates(shares, with_hints=False) == [weighed]
    monkeypatch.setattr(search, "_spans", lambda shares: [])
    search.result.culprits = [loudest]
    assert loudest.tokens not in [hint.tokens for hint in search._candidates(shares, with_hints=True)], "it is named"


@pytest.mark.parametrize(
    ("known", "part", "is_more"),
    [
        ({"closure": 0.7, "square": 334.0}, [0], True),  # what is unseen may be half of what spikes
        ({"closure": 0.7, "square": 333.0}, [0], False),
        ({"closure": 0.981, "square": 1e9}, [0], False),  # an error
        ({"closure": 0.979, "is_trusted": False}, [0], True),
        ({"closure": 0.7, "noise": 0.16, "is_trusted": False}, [0], False),
        ({"closure": 0.7, "noise": 0.14, "is_trusted": False}, [0], True),
        ({"closure": 0.7, "noise": 0.11, "is_trusted": False, "is_noisy": True}, [0], False),
        ({"closure": 0.7, "noise": 0.09, "is_trusted": False, "is_noisy": True}, [0], True),
        ({"closure": 1.5, "square": 1600.0, "is_trusted": False}, [0, 1], True),  # something takes as much back
        ({"closure": 1.5, "square": 1600.0, "is_trusted": False}, [0], False),
        ({"closure": 1.5, "square": 1601.0, "is_trusted": False}, [1], False),
        ({"closure": 1.5, "square": 1600.0}, [1], False),
    ],
)
def test_other_micro_batches_are_read_where_they_may_hide_a_culprit(known, part, is_more):
    search, made = two_planted()
    search.task = replace(made, increments=[9.0, 10.0, 0.0, 1.0])
    assert search.task.reference == 20.0
    usual = {"noise": 0.0, "square": 1.0, "is_trusted": True, "is_noisy": False, "seen": {2}}
    shares = SimpleNamespace(**(usual | known))
    assert search._is_more_to_see(shares, part) is is_more
    search.task = replace(made, increments=[9.0, 10.0, 0.0, 0.9])  # which add up to no spike
    assert search._is_more_to_see(shares, part) is (is_more and not shares.is_trusted)
    search.task = replace(made, increments=None)
    assert search._is_more_to_see(shares, part) is (is_more and known["closure"] < 1)


@pytest.mark.parametrize(
    ("sizes", "closure", "found"),
    [([], 1.0, 0), ([5.1], 1.0, 1), ([4.9], 1.0, 0), ([2.6], 0.5, 1), ([5.1], -1.5, 1), ([9.0, -8.0, 7.0], 1.0, 0)],
)
def test_few_tokens_that_stand_out_of_doubtful_shares_are_tried_with_the_loudest(sizes, closure, found):
    search, made = two_planted()
    products = [torch.zeros(part.shape, dtype=torch.float64) for part in map(made.prober.step.token_mask, range(M))]
    for index, size in enumerate(sizes):
        products[index][0, 0] = 10.0 * size
    tried = search._few_loud_tokens(SimpleNamespace(square=100.0, closure=closure, products=products))
    loudest = [hint.tokens for hint in by_coefficient(made, 2, set())]
    assert [span.micro_batch for span in tried[:found]] == list(range(found)) and len(loudest) == 2
    assert [span.tokens for span in tried[found:]] == (loudest if found else [])


@pytest.mark.parametrize("is_exhausted", [False, True])
def test_where_the_sketch_finds_nothing_either_that_is_why_it_stops(monkeypatch, is_exhausted):
    (search, made), entry = two_planted(), PathEntry("sketch", verdict="measured", note="")
    sketched = SearchResult(path=[entry], exhausted=is_exhausted)
    monkeypatch.setattr(auto, "sketch", lambda task, named: sketched)
    found, nothing = search._look_for_hidden(), "no token, segment or sequence (else) stands out: the spike is spread"
    assert found is search.result and found.path == [entry] and found.exhausted is is_exhausted
    assert found.stop_reason == (made.limit.words if is_exhausted else nothing)


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
    assert (found.culprits, found.status) == ([], "not_found") and found.stop_reason.startswith("the spike is spread")
    assert (
        found.certificate.verdict == "not_explained" and found.certificate.norm_after == found.certificate.norm_before
    )


def test_where_no_more_may_be_named_and_the_limit_is_spent_no_more_is_counted():
    found, _ = searched({(3, 2): 1e4, (9, 1): 1e4, (13, 2): 1e4}, max_culprits=1, max_steps=2)
    assert found.status == "max_culprits" and found.num_more == 0 and found.more_norm is None
    assert found.stop_reason == "search.max_culprits=1 are named"
    assert found.certificate.verdict == "not_explained"


def test_noisy_shares_are_the_mean_of_several_draws_and_these_are_what_is_kept():
    found, _ = searched(dict.fromkeys(PLANTS, 300.0), dtype=torch.bfloat16, noise=(1.0, 3))
    first, *_ = [entry for entry in found.path if entry.phase == "share"]
    assert first.verdict == "untrusted"
    assert found.shares.num_draws == 3 and found.shares.is_trusted


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


def shares_like(made, square, products=(), errors=(), **known):
    """Shares that are 0 but for these tokens' products with the direction, and their errors."""
    values = [
        [torch.zeros(m.shape, dtype=torch.float64) for m in map(made.prober.step.token_mask, range(M))] for _ in "pe"
    ]
    for parts, given in zip(values, (products, errors), strict=True):
        for token, value in dict(given).items():
            row, position = made.prober.step.token_mask(token.micro_batch).nonzero()[token.index].tolist()
            parts[token.micro_batch][row, position] = value
    return SimpleNamespace(square=square, products=values[0], errors=values[1], **known)


@pytest.mark.parametrize(("square", "spikes"), [(400.1, True), (399.9, False)])
def test_the_rest_seems_to_spike_where_half_of_the_threshold_is_left(square, spikes):
    search, made = two_planted()
    token = Token(2, 0, 1)
    shares = shares_like(made, square, {token: 300.0})
    assert search._spikes_beside(shares, [span_of(9.0, 2, 1, 2)]) is spikes and search._spikes_beside(shares, [])


@pytest.mark.parametrize(("error", "are_hints"), [(2.3, True), (2.2, False)])
def test_the_largest_coefficients_are_tried_first_where_half_of_the_noise_is_theirs(error, are_hints):
    search, made = two_planted()
    loudest, second = by_coefficient(made, 2, set())
    shares = shares_like(made, 10.0, errors={loudest.tokens[0]: error}, noise=0.1**0.5)
    assert search._noisy_hints(shares) == ([loudest, second] if are_hints else [])


def test_a_spread_spike_ends_the_search_only_where_nothing_is_left_to_verify(monkeypatch):
    search, made = two_planted()
    monkeypatch.setattr(auto, "why_spread", lambda *given: "for this")
    assert not search._is_spread(None, [], [span_of(9.0), span_of(0.0)])
    assert search._is_spread(None, [], [span_of(9.0)]) and search.result.stop_reason == "the spike is spread: for this"
    search.task = replace(made, spike=replace(made.spike, threshold=None))
    assert not search._is_spread(None, [], []), "a rehearsal"


@pytest.mark.parametrize(("most", "num_more", "status"), [(2, 1, "max_culprits"), (3, 0, "found")])
def test_of_tokens_that_are_not_finite_those_beyond_the_most_are_counted(most, num_more, status):
    found, _ = searched(dict.fromkeys([(3, 2), (9, 1), (13, 2)], math.nan), max_culprits=most)
    assert (len(found.tokens), found.num_more, found.status) == (most, num_more, status)


@pytest.mark.parametrize(("is_trusted", "num_more", "norm"), [(True, 2, 5.0), (False, 0, None)])
def test_what_is_left_of_a_full_list_is_counted_by_its_shares_where_they_are_trusted(
    is_trusted, num_more, norm, monkeypatch
):
    search, _ = two_planted()
    monkeypatch.setattr(auto, "carried", lambda task, shares, spans: (0.9, 0.4))
    monkeypatch.setattr(auto, "are_few", lambda task, shares, spans: True)
    search._measure = lambda number: SimpleNamespace(is_trusted=is_trusted)
    search._spans = lambda shares: [span_of(3.0), span_of(4.0)]
    found = search._count_more()
    assert (found.is_cut, found.num_more, found.more_norm) == (True, num_more, norm)


def test_the_sketch_names_no_more_than_there_is_room_for(monkeypatch):
    search, made = two_planted()
    search.result.culprits = [culprit_of(9.0, 0, index) for index in range(7)]
    hidden = [culprit_of(9.0, 1, index) for index in range(2)]
    monkeypatch.setattr(auto, "sketch", lambda task, named: SearchResult(hidden))
    search.certify = lambda: True
    assert search._look_for_hidden().culprits[7:] == hidden[:1]


def test_of_bisection_s_tokens_those_with_a_culprit_s_norm_are_new_culprits(monkeypatch):
    search, made = two_planted()
    named, loud, quiet = (culprit_of(norm, 0, index) for index, norm in enumerate((9.0, 5.0, 4.9)))
    search.result.culprits = [named]
    path = [PathEntry("halves")]
    monkeypatch.setattr(auto, "bisect", lambda task: SearchResult([named, loud, quiet], path, stop_reason="its end"))
    found = search._fall_back("for this", is_allowed=True)
    assert found.culprits == [named, loud] and found.stop_reason == "for this; bisection: its end"
    assert [entry.phase for entry in found.path[-2:]] == ["bisect", "halves"]
    assert search._fall_back("for that", is_allowed=False).stop_reason == "for that"


@pytest.mark.parametrize(("certainty", "with_others"), [(3.0, True), (1.0, False)])
def test_a_token_that_may_be_noise_is_measured_where_the_rest_spikes_or_nothing_else_is_known(certainty, with_others):
    """One whose share is so many standard errors; beside another that is certain, or alone."""
    search, made = two_planted()
    shares = search._measure_of(range(M))
    certain, other = (replace(hint, norm=made.spike.grad_norm / 2) for hint in by_coefficient(made, 2, set()))
    solid = [certain] if with_others else []
    search._measure = lambda number: shares
    search._candidates = lambda shares, with_hints: list(solid)
    search._spans = lambda shares: [*solid, other] if (shares.certainty or 9.0) < certainty else []
    found = search.run(1, is_last_resort_allowed=False)
    assert {culprit.tokens: culprit.is_exact for culprit in found.culprits}[other.tokens]
    assert len(found.culprits) == 1 + with_others


def test_as_many_tokens_as_are_loud_may_be_singled_out_by_their_coefficients():
    search, _ = two_planted(dict.fromkeys(PLANTS, 1e4))
    shares, counts = search._measure_of(range(M)), []
    search._spans = lambda shares: counts.append(sum(int(mask.sum()) for mask in shares.singled_out)) or []
    search._candidates(shares, with_hints=False)
    assert counts == [8] and search.norm == pytest.approx(search.task.spike.grad_norm)
    assert not any(part.any() for part in search._measure_of([0]).errors[1:]), "nothing is read there"


def test_the_default_search_has_four_rounds_and_last_resorts_and_shares_alone_have_one_round(monkeypatch):
    monkeypatch.setattr(auto._AutoSearch, "run", lambda self, *rounds, **allowed: (*rounds, *allowed.values()))
    _, made = two_planted()
    assert auto.auto(made) == (4, True) and auto.share(made) == (1, False)


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


def read_as(closure: float, noise: float = 0.01, is_trusted: bool = False) -> ShareMap:
    return ShareMap([], [], 100.0, closure, noise, 0.0, is_trusted, 9, 1.0, frozenset({0}))


@pytest.mark.parametrize(
    ("closures", "kept"),
    [
        ([1.4, 1.39, 1.2], 1.39),  # another step says the same
        ([1.4, 1.2, 1.1, 1.0], 1.1),  # a shorter step helps, twice at most
        ([1.4, 1.5], 1.4),  # it does not
        ([0.01, 0.06, 0.2], 0.06),  # no step explains that
        ([math.nan], math.nan),
    ],
)
def test_shares_that_do_not_add_up_are_measured_again_while_that_helps(closures, kept, monkeypatch):
    search, _ = two_planted()
    first, *again = map(read_as, closures)
    monkeypatch.setattr(search, "_measure_of", lambda seen, refined: again.pop(0))
    assert search._refined(first).closure == pytest.approx(kept, nan_ok=True)
    assert len(again) == (1 if kept in (1.39, 1.1, 0.06) else 0)
    assert search._refined(read_as(1.4, is_trusted=True)).closure == 1.4, "nothing is measured"


@pytest.mark.parametrize("is_over", [True, False])
def test_where_the_loudest_tokens_make_the_noise_they_are_named_and_the_rest_is_read_anew(is_over, monkeypatch):
    search, _ = two_planted()
    rounds = []
    monkeypatch.setattr(
        search, "_measure", lambda number: rounds.append(number) or (read_as(1.0, 1.0) if number == 0 else None)
    )
    monkeypatch.setattr(search, "_noisy_hints", lambda shares: ["loud"])
    monkeypatch.setattr(search, "name", lambda candidates: candidates == ["loud"])
    monkeypatch.setattr(search, "certify", lambda: is_over)
    found = search.run(2, is_last_resort_allowed=True)
    assert rounds == ([0] if is_over else [0, 1]) and found.exhausted == (not is_over)


@pytest.mark.parametrize("likely", [[], [Span(9.0, "token", 0, 0, 0, 1)]])
def test_where_nothing_likely_is_a_culprit_the_spike_is_spread_and_else_no_token_is_enough(likely, monkeypatch):
    search, _ = two_planted()
    monkeypatch.setattr(search, "_measure", lambda number: read_as(1.0, is_trusted=True))
    monkeypatch.setattr(search, "_candidates", lambda shares, with_hints: [])
    monkeypatch.setattr(search, "_spans", lambda shares: likely)
    monkeypatch.setattr(search, "_is_spread", lambda *_: False)
    monkeypatch.setattr(search, "name", lambda candidates: False)
    said = "no span of tokens carries enough of the gradient"
    said = said if likely else "the spike is spread: no span of tokens carries a culprit's part of it"
    assert search.run(1, is_last_resort_allowed=False).stop_reason == said


@pytest.mark.parametrize(("is_named", "is_over"), [(True, True), (True, False), (False, True)])
def test_loud_tokens_explain_it_where_they_are_named_and_that_is_certified(is_named, is_over, monkeypatch):
    search, _ = two_planted()
    monkeypatch.setattr(search, "name", lambda candidates: is_named and candidates[0].norm == 0)
    monkeypatch.setattr(search, "certify", lambda: is_over)
    assert search._is_explained_by([Span(9.0, "token", 0, 0, 0, 1)]) == (is_named and is_over)


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
