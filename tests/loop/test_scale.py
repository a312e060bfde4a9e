# SPDX-License-Identifier: Apache-2.0
"""An event of 512 ranks and a million response tokens, simulated: what each rank sends and computes is bounded."""

import pickle
import time
from dataclasses import replace

import pytest

from gradloc.core.ranks import Ranks
from gradloc.loop.gather import raw_event
from tests.toy_model import ToyStep, build, random_batch, shard
from tests.toy_model.events import context_of
from tests.world import REPO

NUM_RANKS, MICRO_BATCHES, ROWS, LENGTH = 512, 4, 2, 256  # 1,048,576 tokens
TOKEN_BYTES = 2 * 4  # two float32, of every micro-batch to keep
ROW_BYTES = 10 * 4 * LENGTH  # log-prob, entropy, coefficient, share: a double and its tag each
MOST_BYTES, MOST_SECONDS = 8_192, 5.0
THRESHOLD = 10.0
PAGES = [(REPO / "docs" / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "how-to.md")]


class OneOfMany(Ranks):
    """Rank 0 of 512 that all hold the same; counts what it sends."""

    def __init__(self):
        super().__init__()
        self.size = NUM_RANKS
        self.num_gathered = self.num_sent = 0

    def gather(self, value):
        self.num_gathered += len(pickle.dumps(value))
        return [[(size, row._replace(rank=rank)) for size, row in value] for rank in range(NUM_RANKS)]

    def gather_first(self, value):
        self.num_gathered += len(pickle.dumps(value))
        return [pickle.loads(pickle.dumps(value)) for _ in range(NUM_RANKS)]

    def broadcast_from(self, rank, value):
        self.num_sent += len(pickle.dumps(value)) if rank == 0 else 0
        return value  # None of the others: their rows are not here


@pytest.fixture(scope="module")
def context():
    """A rank's step with a culprit in half of its rows, and what was found."""
    model = shard(build("tiny"), "plain")
    plants = {(row, 7 * row + 3): 1e5 for row in range(0, MICRO_BATCHES * ROWS, 2)}
    batch = random_batch(model, MICRO_BATCHES * ROWS, LENGTH).planted(plants)
    found = context_of(ToyStep(model, batch, MICRO_BATCHES), batch, THRESHOLD)
    assert len(found.finding.culprits) == len(plants)
    return found


@pytest.mark.parametrize("keeps_all", [False, True], ids=["culprits", "full"])
def test_what_a_rank_sends_of_an_event_does_not_grow_with_the_ranks(context, keeps_all):
    ranks, started = OneOfMany(), time.process_time()
    event = raw_event(replace(context, ranks=ranks, keeps_all=keeps_all))
    seconds = time.process_time() - started
    print(f"{ranks.num_gathered} bytes a rank gathered, {ranks.num_sent} sent by an owner, {seconds:.2f} s of CPU")
    assert ranks.num_gathered <= TOKEN_BYTES * MICRO_BATCHES * ROWS * LENGTH + MOST_BYTES
    assert ranks.num_sent <= 16 * ROW_BYTES + 4 * MOST_BYTES and seconds <= MOST_SECONDS
    if not keeps_all:
        said = f"{ranks.num_gathered / 1e3:.0f} kB", f" {ranks.num_sent / 1e3:.0f} kB"
        assert all(size in page for size in said for page in PAGES), said
    assert len(event.sequences) == 16 and len(event.event.culprits) == 4
    assert len(event.layout) == NUM_RANKS * MICRO_BATCHES


def test_sequences_with_culprits_are_kept_whole(context):
    event = raw_event(context)
    assert {sequence.row for sequence in event.sequences} >= {culprit.row for culprit in event.event.culprits}
    assert {len(sequence.columns["log_prob"]) for sequence in event.sequences} == {LENGTH}
