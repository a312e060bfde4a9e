# SPDX-License-Identifier: Apache-2.0
"""Read a batch from verl 0.9's TransferQueue, in a reproducible order."""

import transfer_queue

from lab.experiments.cpu.fault import Rows
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

TRAINER = "verl.trainer.ppo.v1.trainer_base"
"""Module of the class whose methods are wrapped."""


def fetch(batch, *names: str):
    """Return fields of a batch: nested tensors, or one value per row."""
    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def rows_of(batch, step: int) -> Rows:
    """Return the rows of a batch for the fault; its keys are `<uid>_<rollout>_<part>`."""
    found = fetch(batch, "uid", "responses", "rollout_log_probs")
    return Rows(
        step=step,
        uids=list(found["uid"]),
        rollout_indices=[int(key.split("_")[-2]) for key in batch.keys],
        responses=found["responses"].to_padded_tensor(0),
        log_probs=found["rollout_log_probs"].to_padded_tensor(0),
    )


class InOrder(ReplayBuffer):
    """Sort a batch by its tokens; chosen by `trainer.v1.sampler.custom_sampler`.

    verl passes rows in the order of their answers, with random prompt ids. The last digits of summed gradients depend
    on the order, so runs would not be bitwise reproducible.
    """

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        found = fetch(batch, "prompts", "responses")
        rows = zip(found["prompts"].unbind(), found["responses"].unbind(), strict=True)
        tokens = [[part.tolist() for part in row] for row in rows]
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        batch.keys, batch.tags = ([values[i] for i in order] for values in (batch.keys, batch.tags))
        return batch
