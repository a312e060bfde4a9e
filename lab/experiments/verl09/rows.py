# SPDX-License-Identifier: Apache-2.0
"""A batch in verl 0.9's TransferQueue: in an order of the demo's own, and as what plants something in it sees it."""

import transfer_queue

from lab.experiments.cpu.fault import Rows
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

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


class InOrder(ReplayBuffer):
    """Chosen by `trainer.v1.sampler.custom_sampler`: sorts a batch by its tokens.

    verl hands rows over in the order in which they were answered, under prompt ids drawn anew in each run. Sums of
    gradients depend on the order in their last digits, and so would whether two runs are the same, bit for bit.
    """

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        found = fetch(batch, "prompts", "responses")
        rows = zip(found["prompts"].unbind(), found["responses"].unbind(), strict=True)
        tokens = [[part.tolist() for part in row] for row in rows]
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        batch.keys, batch.tags = ([values[i] for i in order] for values in (batch.keys, batch.tags))
        return batch
