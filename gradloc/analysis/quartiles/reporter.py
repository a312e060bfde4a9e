# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The trainer's side of the quartile analysis: which tokens, when, and what is kept of it."""

import os
import time
from typing import Any

import torch

from ...verl_actor.dispatch import ask_workers
from ..attempts import Attempts
from ..coefficients import BUCKET_KEY
from ..config import QuartileSettings
from ..store import QUARTILES_FOLDER, write_record
from .probe import NUM_SAMPLED_KEY, QUARTILE_KEY, SAMPLE_KEY
from .record import SCHEMA_VERSION, measured, quartile_metrics
from .split import assign, sample_tokens

__all__ = ["QuartileAnalysis"]


class QuartileAnalysis:
    """At the steps that are due, splits the gradient that the batch is about to cause by the tokens' probability.

    Args:
        settings: when and how.
        config: the trainer's whole config.
    """

    def __init__(self, settings: QuartileSettings, config: Any):
        self.settings = settings
        actor = config.actor_rollout_ref.actor
        self.root = os.path.abspath(os.path.expanduser(actor.bisect_dump_dir))
        self.seed = config.data.get("seed") or 0
        self.attempts = Attempts("quartile analysis")

    def run(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> None:
        """Analyse where the step is due; a failure is logged and counted, and training goes on.

        Args:
            trainer: verl's trainer, just before the actor's update.
            batch: the training batch, with advantages; not changed.
            metrics: of the step; added to.
            timing_raw: of the step; ``quartile_analysis`` is added, in seconds.
        """
        step = trainer.global_steps
        if not self.settings.is_due(step) or self.attempts.is_over:
            return
        start = time.perf_counter()
        metrics.update(self.attempts.run(lambda: self._analyse(trainer, batch), step) or {})
        metrics["quartile_analysis/failures"] = self.attempts.num_failures
        timing_raw["quartile_analysis"] = time.perf_counter() - start

    # ---- inside

    def _analyse(self, trainer: Any, batch: Any) -> dict[str, float]:
        """Run one analysis, write it, and return its metrics."""
        start = time.perf_counter()
        arrays = {key: batch.batch[key].float().numpy() for key in ("old_log_probs", "advantages")}
        arrays["responses"] = batch.batch["responses"].numpy()
        mask = batch.batch["response_mask"].bool().numpy()
        quartiles = assign(arrays["old_log_probs"], mask, self.settings.split)
        sampled = sample_tokens(quartiles, self.settings.num_tokens, self.seed + trainer.global_steps)
        numbers = torch.full(quartiles.shape, -1)
        for number, (row, position) in enumerate(sampled.tolist()):
            numbers[row, position] = number
        tensors = {
            BUCKET_KEY: torch.zeros(len(quartiles), dtype=torch.long),
            QUARTILE_KEY: torch.from_numpy(quartiles),
            SAMPLE_KEY: numbers,
        }
        found = ask_workers(trainer, batch, tensors, {NUM_SAMPLED_KEY: len(sampled)})
        record = {
            **self._head(trainer, len(quartiles), found[0]),
            **measured(found, arrays, quartiles, sampled),
            "cost": {
                "forwards": found[0]["forwards"],
                "backwards": found[0]["backwards"],
                "probe_seconds": found[0]["seconds"],
            },
        }
        record["cost"]["seconds"] = time.perf_counter() - start
        record["metrics"] = quartile_metrics(record)
        write_record(self.root, QUARTILES_FOLDER, record)
        return record["metrics"]

    def _head(self, trainer: Any, num_rows: int, raw: dict[str, Any]) -> dict[str, Any]:
        """Which run, step and loss the record is about."""
        config = trainer.config
        actor = config.actor_rollout_ref.actor
        return {
            "schema_version": SCHEMA_VERSION,
            "run": {"project": config.trainer.project_name, "experiment": config.trainer.experiment_name},
            "global_step": trainer.global_steps,
            "split": self.settings.split,
            "num_rows": num_rows,
            "loss": {
                "terms": raw["terms"],
                "loss_mode": actor.policy_loss.get("loss_mode", "vanilla"),
                "loss_agg_mode": actor.loss_agg_mode,
                "adv_estimator": str(config.algorithm.adv_estimator),
            },
        }
