# SPDX-License-Identifier: Apache-2.0
"""The demo's fault in verl 0.9's trainer: tells `experiments.cpu.fault` what the rows of the next advantages are.

Loaded by `actor_rollout_ref.model.external_lib`, which verl imports in the process of the trainer and in the
workers'. The trainer hands an estimator neither step nor tokens, so its method is wrapped.
"""

import functools
import sys

import transfer_queue

from experiments.cpu import fault

TRAINER = "verl.trainer.ppo.v1.trainer_base"


def rows_of(batch, step: int) -> fault.Rows:
    """What the fault needs to know of a batch in TransferQueue; its keys are `<uid>_<rollout>_<part>`."""
    wanted = ["uid", "responses", "rollout_log_probs"]
    found = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
    return fault.Rows(
        step=step,
        uids=list(found["uid"]),
        rollout_indices=[int(key.split("_")[-2]) for key in batch.keys],
        responses=found["responses"].to_padded_tensor(0),
        log_probs=found["rollout_log_probs"].to_padded_tensor(0),
    )


def install(trainer) -> None:
    """Wraps the trainer's `_compute_advantage` once."""
    original = trainer._compute_advantage
    if getattr(original, "_gradloc_demo", False):
        return

    @functools.wraps(original)
    def compute_advantage(self, batch, metrics):
        if fault.armed() is None:
            fault.arm(fault.Fault(**self.config.demo.fault))
        fault.observe(rows_of(batch, self.global_steps))
        return original(self, batch, metrics)

    compute_advantage._gradloc_demo = True
    trainer._compute_advantage = compute_advantage


if TRAINER in sys.modules:  # not in the workers
    install(sys.modules[TRAINER].PPOTrainer)
