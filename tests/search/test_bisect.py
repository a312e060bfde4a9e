# SPDX-License-Identifier: Apache-2.0
"""The published search follows every part over its threshold, worst first, down to single tokens.

Here a token's gradient is a number, a part's norm the size of their sum, and tau 1. Tokens weigh 1, so the threshold of
n of them is the published tau / sqrt(n) times n (docs/method.md, section 5).
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gradloc.core.probe import Measurement
from gradloc.core.selection import Token
from gradloc.search import bisect


class Numbers:
    """A prober of two micro-batches on two ranks with four tokens each."""

    def __init__(self, given):
        self.values = [[[given.get((m, r, t), 0.0) for t in range(4)] for r in range(2)] for m in range(2)]
        self.step, self.ranks = SimpleNamespace(num_micro_batches=2), SimpleNamespace(size=2)
        self.num_probes = 0

    def measure(self, part):
        self.num_probes += 1
        ranks = self.values[part.micro_batch][part.first_rank : part.end_rank]
        values = [value for rank in ranks for value in rank[part.first_token : part.end_token]]
        return Measurement(abs(sum(values)), len(values), len(values) ** 0.5)


def found_in(monkeypatch, given, most=8, budget=100, broken=None):
    prober = Numbers(given)
    made = SimpleNamespace(
        prober=prober, tau=1.0, max_culprits=most, broken=broken, limit=SimpleNamespace(words="spent")
    )
    made.can_afford = lambda backwards: prober.num_probes + backwards <= budget
    monkeypatch.setattr(bisect, "with_measured_norm", lambda task, span, threshold: replace(span, threshold=threshold))
    return bisect.bisect(made), prober.num_probes


@pytest.mark.parametrize(
    ("given", "tokens", "why"),
    [
        ({(0, 1, 2): 3.0}, [(0, 1, 2)], "followed to its end"),
        ({(0, 1, 2): 2.8}, [], "no micro-batch is over"),  # the root of its eight tokens is 2.83
        ({(0, 1, 2): math.nan}, [(0, 1, 2)], "followed to its end"),
        ({(0, 0, 3): 5.0, (1, 1, 0): 9.0}, [(1, 1, 0), (0, 0, 3)], "followed to its end"),  # worst first
        ({(0, 0, 3): 5.0, (0, 0, 2): -5.0}, [], "no micro-batch is over"),  # a pair that cancels is missed
        ({(0, r, t): 0.9 for r in range(2) for t in range(4)}, [], "the spike is spread"),
        ({(0, 0, 0): 1.0, (0, 0, 1): 4.0}, [(0, 0, 1)], "followed to its end"),  # as large as tau is not over it
    ],
)
def test_what_is_over_its_threshold_is_followed_to_single_tokens(monkeypatch, given, tokens, why):
    found, num_probes = found_in(monkeypatch, given)
    assert [culprit.tokens for culprit in found.culprits] == [(Token(*token),) for token in tokens]
    assert why in found.stop_reason and num_probes == len(found.path)
    assert "unopened" not in {entry.verdict for entry in found.path}


def test_the_path_says_of_each_part_what_became_of_it(monkeypatch):
    path = found_in(monkeypatch, {(0, 0, 0): 1.0, (0, 0, 1): 4.0})[0].path
    told = [(entry.phase, entry.verdict, entry.num_tokens, entry.threshold) for entry in path]
    assert told == [
        ("micro_batch", "split", 8, pytest.approx(8**0.5)),
        ("micro_batch", "under", 8, pytest.approx(8**0.5)),
        ("rank", "split", 4, 2.0),
        ("rank", "under", 4, 2.0),
        ("token", "split", 2, pytest.approx(2**0.5)),
        ("token", "under", 2, pytest.approx(2**0.5)),
        ("token", "under", 1, 1.0),
        ("token", "culprit", 1, 1.0),
    ]
    spread = found_in(monkeypatch, {(0, r, t): 0.9 for r in range(2) for t in range(4)})[0].path
    assert [entry.verdict for entry in spread].count("spread") == 4, "pairs, neither half of which is over"


@pytest.mark.parametrize(("budget", "num_probes", "num_culprits"), [(7, 6, 0), (8, 8, 1), (1, 1, 0), (15, 14, 2)])
def test_a_budget_is_never_exceeded_and_both_halves_are_probed_or_none(monkeypatch, budget, num_probes, num_culprits):
    found, made = found_in(monkeypatch, {(0, 0, 0): 9.0, (1, 1, 1): 8.0}, budget=budget)
    assert (made, len(found.culprits)) == (num_probes, num_culprits)
    assert found.exhausted is (num_culprits < 2) and (found.stop_reason == "spent") is found.exhausted


def test_it_ends_with_as_many_culprits_as_may_be_named(monkeypatch):
    found, num_probes = found_in(monkeypatch, {(0, 0, 0): 9.0, (1, 1, 1): 8.0}, most=1)
    assert len(found.culprits) == 1 and num_probes == 8 and "1 culprits were found, as many as" in found.stop_reason


def test_where_a_micro_batch_is_known_to_be_broken_no_other_is_probed(monkeypatch):
    found, num_probes = found_in(monkeypatch, {(1, 0, 2): math.nan}, broken=1)
    assert [culprit.tokens for culprit in found.culprits] == [(Token(1, 0, 2),)] and num_probes == 7
