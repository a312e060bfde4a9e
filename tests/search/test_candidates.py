# SPDX-License-Identifier: Apache-2.0
"""512 ranks and a million response tokens, simulated: what each rank sends, and how long it computes, is bounded."""

import pickle
import time
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.search.candidates import by_value, non_finite
from gradloc.search.task import Task

NUM_RANKS, MICRO_BATCHES, ROWS, LENGTH = 512, 4, 2, 256  # 1,048,576 tokens
MOST_BYTES, MOST_SECONDS = 16_384, 5.0


class OneOfMany(Ranks):
    """Rank 0 of 512 that all hold the same; counts what is sent and what comes of it."""

    def __init__(self):
        super().__init__()
        self.size, self.num_sent = NUM_RANKS, 0

    def gather(self, value):
        sent = pickle.dumps(value)
        self.num_sent = max(self.num_sent, len(sent))
        return [pickle.loads(sent) for _ in range(NUM_RANKS)]


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


@pytest.mark.parametrize("share_broken", [0.01, 0.3, 1.0])
def test_where_some_or_all_tokens_are_not_finite_a_few_spans_of_each_rank_travel(share_broken):
    task = task_of(share_broken)
    started = time.process_time()
    found = non_finite(task)
    seconds, num_sent = time.process_time() - started, task.prober.ranks.num_sent
    print(f"{share_broken:.1%} not finite: {num_sent} bytes a rank, {seconds:.2f} s of CPU, {len(found)} spans")
    assert 0 < len(found)
    assert num_sent <= MOST_BYTES and seconds <= MOST_SECONDS


def test_where_every_token_is_a_candidate_the_largest_of_each_rank_travel():
    task = task_of(0.0)
    values = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)).abs() + 1
    started = time.process_time()
    found = by_value(task, lambda index: values, 0.5, set())
    seconds, num_sent = time.process_time() - started, task.prober.ranks.num_sent
    print(f"all tokens: {num_sent} bytes a rank, {seconds:.2f} s of CPU, {len(found)} candidates")
    assert num_sent <= MOST_BYTES and seconds <= MOST_SECONDS
    tokens = {token.index for token in found[0].tokens}
    assert tokens == {int(values.flatten().argmax())}
