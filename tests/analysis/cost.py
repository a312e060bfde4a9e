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


def measure(num_terms: int, num_buckets: int, dump_dir: str) -> dict[str, Any]:
    """Runs on every rank of a world; seconds are medians."""
    import torch

    from tests.analysis.scenarios import TERMS, local_rows, with_buckets
    from tests.world.harness import make_batch, make_trainer
    from verl.gradloc.adapters.verl07.analysis_actor import analyze

    trainer = make_trainer(SIZES + (TERMS if num_terms == 3 else []), dump_dir)
    generator = torch.Generator().manual_seed(0)
    group = torch.randperm(NUM_ROWS, generator=generator) // GROUP_SIZE
    buckets = (group * num_buckets // (NUM_ROWS // GROUP_SIZE)).tolist()
    updates, analyses, record = [], [], {}
    for _ in range(REPEATS):
        batch = make_batch(NUM_ROWS)
        updates.append(_seconds(lambda: trainer.actor.update_policy(local_rows(batch))))  # noqa: B023
        local = local_rows(with_buckets(batch, buckets))
        analyses.append(_seconds(lambda: record.update(analyze(trainer.actor, local))))  # noqa: B023
    return {
        "passes": record["backwards"],
        "update_s": statistics.median(updates),
        "analysis_s": statistics.median(analyses),
        "ratio": statistics.median(a / u for a, u in zip(analyses, updates, strict=True)),
    }


def _seconds(work) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def main(tree: str) -> None:
    """Prints the table."""
    world = World(2, path=(str(Path(tree).resolve()),))
    print("| terms | buckets | passes (update: 16) | update, s | analysis, s | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for terms in (1, 3):
        for buckets in (1, 4, 8):
            found = world.run(
                "tests.analysis.cost.measure", timeout_s=600, num_terms=terms, num_buckets=buckets, dump_dir="unused"
            )[0]
            print(
                f"| {terms} | {buckets} | {found['passes']} | {found['update_s']:.2f} | "
                f"{found['analysis_s']:.2f} | {found['ratio']:.1f} |",
                flush=True,
            )
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
