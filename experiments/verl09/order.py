# SPDX-License-Identifier: Apache-2.0
"""The demo's sampler for verl 0.9: a batch's rows in an order of their own.

verl hands them over in the order in which they were answered, under prompt ids drawn anew in each run. Sums of
gradients depend on the order in their last digits, and so would whether two runs are the same, bit for bit.
"""

import transfer_queue

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class InOrder(ReplayBuffer):
    """Chosen by `trainer.v1.sampler.custom_sampler`: sorts a batch by its tokens."""

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        wanted = ["prompts", "responses"]
        found = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=wanted)
        rows = zip(*(found[name].unbind() for name in wanted), strict=True)
        tokens = [[part.tolist() for part in row] for row in rows]
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        batch.keys, batch.tags = ([values[i] for i in order] for values in (batch.keys, batch.tags))
        return batch
