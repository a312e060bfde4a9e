# SPDX-License-Identifier: Apache-2.0
"""A batch in verl 0.9's TransferQueue, as what plants something in it sees it."""

import transfer_queue

from experiments.cpu.fault import Rows

TRAINER = "verl.trainer.ppo.v1.trainer_base"
"""The module of the class whose methods are wrapped."""


def fetch(batch, *names: str):
    """Fields of a batch in TransferQueue: nested tensors, and other values by row."""
    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def rows_of(batch, step: int) -> Rows:
    """What is planted by: the rows of a batch; its keys are `<uid>_<rollout>_<part>`."""
    found = fetch(batch, "uid", "responses", "rollout_log_probs")
    return Rows(
        step=step,
        uids=list(found["uid"]),
        rollout_indices=[int(key.split("_")[-2]) for key in batch.keys],
        responses=found["responses"].to_padded_tensor(0),
        log_probs=found["rollout_log_probs"].to_padded_tensor(0),
    )
