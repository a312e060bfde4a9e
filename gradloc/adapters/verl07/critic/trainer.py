# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the critic's localization: what the trainer does around the critic's update."""

from typing import Any

import torch

from ....keys import POLICY_KEY, ROW_KEY
from ....loop.batch import BatchView
from ...verl_common.driver import VerlDriver
from ...verl_common.reports import reports_of
from ..worker import report_of_critic


class CriticSide:
    """Stands between verl's trainer and the critic's workers.

    Args:
        trainer: verl's, before its workers are there.
        driver: the critic's.
    """

    def __init__(self, trainer: Any, driver: VerlDriver):
        self._trainer, self.driver = trainer, driver

    def begin_fit(self) -> None:
        """Once the workers are there."""
        group = self._trainer.critic_wg
        self._call, group.update_critic = group.update_critic, self._update

    def _update(self, batch: Any) -> Any:
        trainer, driver = self._trainer, self.driver
        dp_size = trainer._get_dp_size(trainer.critic_wg, "critic")
        policy = driver.before_batch(batch.batch["response_mask"], trainer.global_steps, dp_size)
        batch.batch[ROW_KEY] = torch.arange(len(batch))
        batch.meta_info[POLICY_KEY] = policy
        try:
            output = self._call(batch)
        finally:
            batch.meta_info.pop(POLICY_KEY)
            batch.batch.pop(ROW_KEY)
        reports = reports_of(trainer.critic_wg, report_of_critic)
        view = BatchView(batch.batch, batch.non_tensor_batch, is_critics=True)
        output.meta_info["metrics"] |= driver.after_update(reports, view)
        return output
