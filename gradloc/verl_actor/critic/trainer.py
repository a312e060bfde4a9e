# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the critic's localization: what the trainer does around the critic's update."""

import math
from typing import Any

import torch

from ...keys import EVENTS_KEY, POLICY_KEY, ROW_KEY, SETTINGS_KEY
from ...loop.batch import BatchView
from ...loop.driver import Driver

__all__ = ["CriticSide"]


class CriticSide:
    """Stands between verl's trainer and the critic's workers.

    Args:
        trainer: verl's, before its workers are there.
        driver: the critic's.
    """

    def __init__(self, trainer: Any, driver: Driver):
        self._trainer, self.driver = trainer, driver

    def begin_fit(self) -> None:
        """Once the workers are there."""
        group = self._trainer.critic_wg
        self._call, group.update_critic = group.update_critic, self._update

    def _update(self, batch: Any) -> Any:
        trainer, driver = self._trainer, self.driver
        dp_size = trainer._get_dp_size(trainer.critic_wg, "critic")
        policy = driver.before_update(batch.batch["response_mask"], trainer.global_steps, dp_size)
        batch.batch[ROW_KEY] = torch.arange(len(batch))
        batch.meta_info |= {POLICY_KEY: policy.as_dict(), SETTINGS_KEY: driver.settings}
        try:
            output = self._call(batch)
        finally:
            batch.meta_info = {k: v for k, v in batch.meta_info.items() if k not in (POLICY_KEY, SETTINGS_KEY)}
            batch.batch.pop(ROW_KEY)
        metrics = output.meta_info["metrics"]
        reports = metrics.pop(EVENTS_KEY)
        (first,) = (report for report in reports if "events" in report)
        found = driver.after_update(
            first["norms"],
            first["events"],
            BatchView(batch.batch, batch.non_tensor_batch, is_critics=True),
            first["outcomes"],
            [report["coefficient"] for report in reports],
            zip(*(report["head_squares"] for report in reports), strict=True),
        )
        largest = max(first["norms"], key=lambda norm: math.inf if norm != norm else norm)
        metrics |= {"critic/grad_norm_max": [largest], "gradloc/critic_failures": [first["failures"]], **found}
        return output
