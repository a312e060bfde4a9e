# SPDX-License-Identifier: Apache-2.0
"""What an analysis costs against one update: the table of docs/buckets.md.

    python -m tests.analysis.cost VERL_TREE

Two ranks, 128 rows, 16 micro-batches of 4 rows on each, groups of 8 rows scattered over the ranks.
Updates and analyses alternate, so that whatever else the machine does slows both.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.world import World

NUM_ROWS, GROUP_SIZE, REPEATS = 128, 8, 8
SIZES = ["actor_rollout_ref.actor.ppo_mini_batch_size=128", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]


def measure(num_terms: int, num_buckets: int, dump_dir: str) -> str:
    """Runs on every rank of a world; a line of the table, of medians in seconds."""
    import torch

    from tests.analysis.scenarios import TERMS, with_buckets
    from tests.world.harness import make_batch, make_trainer

    trainer = make_trainer(SIZES + (TERMS if num_terms == 3 else []), dump_dir)
    group = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0)) // GROUP_SIZE
    buckets = (group * num_buckets // (NUM_ROWS // GROUP_SIZE)).tolist()
    batch, updates, analyses = make_batch(NUM_ROWS), [], []
    for _ in range(REPEATS):
        updates.append(_timed(trainer.update, batch)[0])
        seconds, record = _timed(trainer.analyze, with_buckets(batch, buckets))
        analyses.append(seconds)
    ratio = statistics.median(analysis / update for analysis, update in zip(analyses, updates, strict=True))
    update_s, analysis_s = statistics.median(updates), statistics.median(analyses)
    return f"| {num_terms} | {num_buckets} | {record['backwards']} | {update_s:.2f} | {analysis_s:.2f} | {ratio:.1f} |"


def _timed(work, *args) -> tuple[float, Any]:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    answer = work(*args)
    dist.barrier()
    return time.perf_counter() - start, answer


if __name__ == "__main__":
    world = World(2, path=(str(Path(sys.argv[1]).resolve()),))
    print("| terms | buckets | passes (update: 16) | update, s | analysis, s | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for terms, buckets in ((1, 1), (1, 4), (1, 8), (3, 1), (3, 4), (3, 8)):
        sizes = dict(num_terms=terms, num_buckets=buckets, dump_dir="unused")
        print(world.run("tests.analysis.cost.measure", timeout_s=600, **sizes)[0], flush=True)
    world.close()
