# SPDX-License-Identifier: Apache-2.0
"""Install the demo's rollout and its fault on verl 0.9.

Loaded by `actor_rollout_ref.model.external_lib` in the processes of the trainer and of the workers. The trainer passes
neither step nor tokens to an estimator, so its method is wrapped to pass the rows to `lab.experiments.cpu.fault`.
"""

import sys

from lab.experiments.cpu import fault
from lab.experiments.verl09 import rollout  # noqa: F401  # its import registers the demo's rollout
from lab.experiments.verl09.rows import TRAINER, rows_of


def install(trainer) -> None:
    """Wrap the trainer's `_compute_advantage`."""
    original = trainer._compute_advantage

    def compute_advantage(self, batch, metrics):
        if fault.armed() is None:
            fault.arm(fault.Fault(**self.config.demo.fault))
        fault.observe(rows_of(batch, self.global_steps))
        return original(self, batch, metrics)

    trainer._compute_advantage = compute_advantage


if TRAINER in sys.modules:  # only in the trainer's process
    install(sys.modules[TRAINER].PPOTrainer)
