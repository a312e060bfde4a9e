# SPDX-License-Identifier: Apache-2.0
"""Which spans may be culprits; of 512 ranks and a million tokens, simulated, what each sends is bounded."""

import math
import pickle
import random
import time
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.search.batch import is_spread
from gradloc.search.candidates import (
    drop_overlapping,
    find_by_share,
    find_by_value,
    find_non_finite,
    propose,
    spans_in,
    sum_products,
)
from gradloc.search.share import ShareMap
from gradloc.search.task import Span, Task

NUM_RANKS, MICRO_BATCHES, ROWS, LENGTH = 512, 4, 2, 256  # 1,048,576 tokens
MOST_BYTES, MOST_SECONDS = 16_384, 1.0


class OneOfMany(Ranks):
    """Rank 0 of many that all hold the same; counts what is sent and what comes of it."""

    def __init__(self, size=NUM_RANKS):
        super().__init__()
        self.size, self.num_sent = size, 0

    def gather(self, value):
        sent = pickle.dumps(value)
        self.num_sent = max(self.num_sent, len(sent))
        return [pickle.loads(sent) for _ in range(self.size)]

    def sum(self, values):
        return [self.size * value for value in values]


def task_of(share_broken: float) -> Task:
    """A step in which this share of the tokens, of every row alike, has no finite coefficient and log-prob."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    is_broken = torch.rand(ROWS, LENGTH, generator=generator) < share_broken
    values = torch.randn(ROWS, LENGTH, generator=generator).masked_fill(is_broken, float("nan"))
    step = SimpleNamespace(
        num_micro_batches=MICRO_BATCHES,
        token_mask=lambda index: mask,
        coefficients=lambda index: (values, None),
        recorded=lambda index: SimpleNamespace(log_prob=values - 1),
    )
    return SimpleNamespace(prober=SimpleNamespace(step=step, ranks=OneOfMany()), max_culprits=8, culprit_norm=1.0)


@pytest.mark.parametrize("share_broken", [0.0, 0.01, 0.3, 1.0])
def test_however_many_tokens_are_candidates_a_few_spans_of_each_rank_travel(share_broken):
    values = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)).abs() + 1
    task, started = task_of(share_broken), time.process_time()
    found = find_non_finite(task) if share_broken else find_by_value(task, lambda index: values, 0.5, ())
    seconds, num_sent = time.process_time() - started, task.prober.ranks.num_sent
    print(f"{share_broken:.1%} not finite: {num_sent} bytes a rank, {seconds:.2f} s of CPU, {len(found)} spans")
    assert found and num_sent <= MOST_BYTES and seconds <= MOST_SECONDS
    assert share_broken or found[0].start == int(values.flatten().argmax()), "the largest"


@pytest.mark.parametrize(("num_ranks", "most_s"), [(64, 0.5), (512, MOST_SECONDS), (2048, 4 * MOST_SECONDS)])
def test_what_ranks_do_between_two_passes_of_a_spread_spike_grows_with_their_number_alone(num_ranks, most_s):
    """All tokens of all ranks carry alike, as where a run collapses: the host work of a round of the search."""
    task, generator = task_of(0.0), torch.Generator().manual_seed(1)
    task.prober.ranks = OneOfMany(num_ranks)
    total = num_ranks * MICRO_BATCHES * ROWS * LENGTH
    products = torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64) + 0.5
    errors, mask = products * 0, torch.ones(ROWS, LENGTH, dtype=torch.bool)
    nothing, readout = [products * 0] * MICRO_BATCHES, SimpleNamespace(slope=products, weight=products)
    step = task.prober.step
    step.token_weights = lambda index: errors + 1.0
    spike = SimpleNamespace(grad_norm=float(total) ** 0.5, threshold=1e-4 * total**0.5, num_tokens=total)
    found = SimpleNamespace(
        **{name: getattr(task, name) for name in ("prober", "max_culprits")},
        culprit_norm=1e-5,
        usual_coefficient=None,
        unit=1.0,
        reference=spike.threshold,
        spike=spike,
        gradient=None,
        scale=1.0,
        readouts=lambda named: [readout] * MICRO_BATCHES,
        kept=lambda spans, index: ~torch.zeros_like(mask),
    )
    shares = ShareMap([products] * MICRO_BATCHES, nothing, float(total), 1.0, 0.0, 0.0, True, total, 1.0)
    started = time.process_time()
    spans = propose(found, shares, ())
    spread = is_spread(found, shares, spans)
    seconds = time.process_time() - started
    print(f"{num_ranks} ranks: {seconds:.2f} s of CPU on each, {len(spans)} spans, spread: {spread}")
    assert seconds <= most_s and len(spans) <= 600


def token_at(micro_batch, rank, index):
    return Span(0.0, "token", micro_batch, rank, index, index + 1)


def one_rank(values, log_probs=None, **known):
    """A task of one rank whose micro-batches hold these rows of coefficients, and their log-probs where told."""
    rows = [torch.tensor(part, dtype=torch.float64) for part in values]
    step = SimpleNamespace(
        num_micro_batches=len(rows),
        token_mask=lambda index: torch.ones_like(rows[index], dtype=torch.bool),
        coefficients=lambda index: (rows[index], None),
        recorded=lambda index: SimpleNamespace(log_prob=rows[index] * 0 if log_probs is None else log_probs[index]),
        token_weights=lambda index: torch.ones_like(rows[index]),
    )
    readouts = [SimpleNamespace(slope=row, weight=row.abs()) for row in rows]
    made = {
        "max_culprits": 8,
        "usual_coefficient": None,
        "culprit_norm": 1.0,
        "unit": 1.0,
        "readouts": lambda named: readouts,
    }
    return SimpleNamespace(prober=SimpleNamespace(step=step, ranks=Ranks()), **(made | known))


def test_what_is_not_finite_is_a_token_a_segment_or_a_row():
    nan, finite = math.nan, torch.zeros(1, 5)
    values = [[[1.0, nan, 1.0, math.inf, 1.0]], [[nan] * 5], [[1.0, nan, 1.0, nan, 1.0]], [[1.0] * 5]]
    broken = torch.tensor([[0.0, -math.inf, 0.0, nan, 0.0]])
    found = find_non_finite(one_rank(values, [finite, finite, broken, finite]))
    told = sorted((span.micro_batch, span.start, span.end, span.span, span.norm) for span in found)
    assert told == [
        (0, 1, 2, "token", 0.0),
        (0, 3, 4, "token", 0.0),
        (1, 0, 5, "sequence", 0.0),
        (2, 1, 4, "segment", 0.0),
    ]


def test_a_span_s_bound_is_its_product_with_the_gradient_over_the_norm():
    products = [[[30.0, 0.1, 0.1, -0.1]], [[0.1, 9.9, 0.1, 0.1]], [[-12.0, -14.0, -15.0, -13.0]]]
    task, parts = one_rank(products), [torch.tensor(part, dtype=torch.float64) for part in products]
    shares = SimpleNamespace(square=100.0, products=parts, doubt=lambda i: parts[i] * 0 + 1.0)
    told = [(span.span, span.micro_batch, span.start, span.end, span.norm) for span in find_by_share(task, shares, ())]
    assert told == [
        ("sequence", 2, 0, 4, pytest.approx(5.4 - 0.2)),
        ("token", 0, 0, 1, pytest.approx(2.9)),
    ]


@pytest.mark.parametrize(("product", "needs_backward"), [(60.0, False), (40.0, True)])
def test_a_hint_that_carries_most_of_what_is_left_needs_no_backward_if_its_share_proves_half(product, needs_backward):
    products = [torch.tensor([[9900.0, 0.0, product, 0.0]], dtype=torch.float64)]
    known = {"is_trusted": True, "is_exact": True, "closure": 1.0, "doubt": lambda index: products[index] * 0}
    shares = SimpleNamespace(square=1e4, products=products, **known)
    span, hint = propose(one_rank([[[5.0, 0.01, 5.0, 0.01]]], reference=4.0), shares, ())
    assert (span.start, hint.start) == (0, 2)
    assert (hint.norm < hint.threshold) is needs_backward


def test_what_tokens_carry_adds_up():
    task = one_rank([[[0.0] * 3], [[0.0] * 3]])
    shares = SimpleNamespace(products=[torch.tensor([[1.0, -2.0, 4.0]]), torch.tensor([[8.0, 16.0, 0.0]])])
    tokens = [Span(0.0, "segment", 0, 0, 1, 3), token_at(1, 0, 0), token_at(0, 1, 0)]  # the last is another rank's
    assert sum_products(task, shares, tokens) == 10.0


def test_spans_that_share_a_token_are_not_apart():
    known = [Span(1.0, "segment", 0, 0, 2, 5), token_at(1, 0, 0)]
    spans = [Span(1.0, "segment", 0, 0, 0, 2), token_at(0, 0, 4), token_at(0, 1, 4), Span(1.0, "sequence", 1, 0, 0, 9)]
    assert drop_overlapping(known, spans) == [spans[0], spans[2]] and drop_overlapping([], spans) == spans


# ---- which tokens of a row are named: some, a segment, or the whole of it


def spans(values, is_strong=False, errors=None):
    """Of a culprit's norm of 1; in other units, and with the signs turned, they are the same."""
    values, errors = torch.tensor(values), torch.zeros(len(values)) if errors is None else torch.tensor(errors)
    found = spans_in(values, errors, is_strong, 1.0, 1.0)
    assert spans_in(4 * values, 4 * errors, is_strong, 4.0, 4.0) == found
    assert spans_in(-values, errors, is_strong, 1.0, 1.0) == found
    return found


def test_a_row_is_named_by_its_loud_tokens_its_segment_or_as_a_sequence():
    quiet = [0.01] * 40
    assert spans(quiet) == []
    assert spans([*quiet, 5.0, *quiet]) == [(40, 41)]
    assert spans([5.0, *quiet, 5.0, *quiet, -9.0]) == [(0, 1), (41, 42), (82, 83)]
    assert spans([*quiet, *[3.0] * 16, *quiet]) == [(40, 56)], "a cluster is one segment"
    assert spans([*[3.0] * 4, 0.01, *[3.0] * 4, *quiet]) == [(0, 4), (5, 9)], "without its quiet inner token"
    assert spans([0.1] * 60) == [(0, 60)], "nor is it overlooked when none of them is loud"
    assert spans([4.0, -4.0, *quiet]) == [(0, 1), (1, 2)], "a pair that cancels"
    assert spans([4.0, *[0.01] * 8, 3.9, *quiet]) == [(0, 1), (9, 10)], "two tokens, not what is between"
    assert spans([0.001, 2.0, 0.001], errors=[0.01, 1.5, 0.01]) == [], "it may be chance"


def test_a_row_that_the_loss_pulls_more_as_a_whole_is_a_sequence_unless_few_tokens_carry_it():
    values = [2.0, 0.6, 1.5, 0.2, 0.3, 1.1, 0.4, 0.6, 0.3, 0.1]
    assert spans(values, is_strong=True) == [(0, 10)] != spans(values)
    assert spans([9.0, 9.0, 9.0] + [0.01] * 7, is_strong=True) == [(0, 3)]


def test_a_row_that_the_loss_pulls_alike_is_a_sequence_where_it_is_a_culprit_without_its_loud_tokens():
    document, middle = torch.tensor([0.8, 1.1, 0.7, 1.9, 0.6, 1.8]), torch.tensor([0.01] * 20 + [2.0] * 12)
    for values, expected in ((document, [(0, 6)]), (middle, [(20, 32)]), (document * 0.1, [])):
        assert spans_in(values, values * 0, False, 1.0, 1.0, is_alike=True) == expected
    assert spans_in(document, document * 0, False, 1.0, 1.0) == [(1, 2), (3, 4), (5, 6)], "pulled by themselves"


def test_neighbours_that_the_loss_pulls_as_much_join_the_loud_tokens_between_them():
    values = torch.tensor([0.01] * 10 + [1.5, 0.9, 1.4, 0.8, 1.2] + [0.01] * 10)
    apart, pulls = [(10, 11), (12, 13), (14, 15)], torch.ones(25)
    pulls[[10, 12, 14]] = 100.0
    for others, expected in ((90.0, [(10, 15)]), (20.0, apart)):
        pulls[[2, 11, 13]] = others
        assert spans_in(values, values * 0, False, 1.0, 9.0, pulls=pulls, unusual=3.0) == expected
    pulls[[11, 13]] = 90.0
    assert spans_in(values, values * 0, False, 1.0, 9.0, pulls=pulls, unusual=99.0) == apart, "as all of the row is"
    values[[11, 13]] = 0.0
    assert spans_in(values, values * 0, False, 1.0, 9.0, pulls=pulls, unusual=3.0) == apart, "these are named already"


@pytest.mark.parametrize("seed", range(20))
def test_a_row_without_a_loud_token_is_named_by_the_shortest_run_that_carries_nine_tenths_without_its_gap(seed):
    source = random.Random(seed)
    values = [source.choice([0.0, 0.1, 0.5]) if source.random() < 0.3 else 0.001 for _ in range(12)]
    runs = [(start, start + length) for length in range(1, 7) for start in range(13 - length)]
    first, end = next(((a, b) for a, b in runs if sum(values[a:b]) >= 0.9 * sum(values)), (0, 12))
    least = max(values) * 1.01
    made = torch.tensor(values, dtype=torch.float64)
    is_one = sum(values[first:end]) >= least
    found = spans_in(made, made * 0, False, least, least)
    named = [number for a, b in found for number in range(a, b)]
    assert bool(named) == is_one and set(named) <= set(range(first, end))
    if len(named) > 2:
        assert found == [(first, end)], "where more than two carry it"
    elif named:
        assert sum(made[named]) >= 0.9 * sum(values[first:end]) - 1e-12 and min(made[named]) > 0.001
    assert spans_in(made, made * 0, False, least, 99.0) == [], "unless all rows are like it"
