# SPDX-License-Identifier: Apache-2.0
"""What the demo has verl 0.9 import: its rollout, and its fault in the trainer.

Loaded by `actor_rollout_ref.model.external_lib`, which takes one name, in the process of the trainer and in the
workers'. The trainer hands an estimator neither step nor tokens, so its method is wrapped: it tells
`lab.experiments.cpu.fault` what the rows of the next advantages are.
"""

import sys

from lab.experiments.cpu import fault
from lab.experiments.verl09 import rollout
from lab.experiments.verl09.rows import TRAINER, rows_of

__all__ = ["rollout"]


def install(trainer) -> None:
    """Wraps the trainer's `_compute_advantage`."""
    original = trainer._compute_advantage

    def compute_advantage(self, batch, metrics):
        if fault.armed() is None:
            fault.arm(fault.Fault(**self.config.demo.fault))
        fault.observe(rows_of(batch, self.global_steps))
        return original(self, batch, metrics)

    trainer._compute_advantage = compute_advantage


if TRAINER in sys.modules:  # not in the workers
    install(sys.modules[TRAINER].PPOTrainer)
