# SPDX-License-Identifier: Apache-2.0
"""While a run trains: the kind every few steps, on the driver, from what the batch has anyway."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..record.store import plain
from .columns import MismatchError, columns
from .verdict import judge

logger = logging.getLogger(__name__)
TOKENS = 50_000
"""Looked at of a batch: whole rows, evenly spread."""


class StepJudge:
    """Judges the batch of each ``every``-th step (0: never) and appends the verdict to ``mismatch.jsonl``.

    No forward, no collective. What fails is logged, and training goes on.
    """

    def __init__(self, every: int, folder: str | os.PathLike[str]):
        self.every, self.path = every, os.path.join(folder, "mismatch.jsonl")
        self._last: int | None = None
        """The step that was judged last: an update in stages asks twice."""

    def __call__(self, tensors: Mapping[str, Any], labels: Mapping[str, Sequence[Any]], step: int) -> dict[str, float]:
        """Return the metrics of a step that is looked at, else none.

        Read are ``rollout_log_probs``, ``old_log_probs``, ``response_mask`` and ``responses`` of ``tensors``, (R, T) on
        the host, and each row's ``uid`` of ``labels``, where there is one.
        """
        names = ("rollout_log_probs", "old_log_probs", "response_mask")
        if not self.every or step % self.every or step == self._last or not set(names) <= set(tensors.keys()):
            return {}
        self._last = step
        try:
            return self._judged(tensors, labels, step)
        except MismatchError as error:
            logger.warning("gradloc: the log-probs of step %d cannot be compared: %s", step, error)
        except Exception:
            logger.exception("gradloc: step %d's log-probs were not compared; training goes on", step)
        return {}

    def _judged(self, tensors: Mapping[str, Any], labels: Mapping[str, Sequence[Any]], step: int) -> dict[str, float]:
        mask = tensors["response_mask"]
        wanted = max(1, round(len(mask) * min(1.0, TOKENS / max(float(mask.sum()), 1.0))))
        rows = np.linspace(0, len(mask) - 1, wanted).astype(int).tolist()

        def of(name: str) -> Any:
            return tensors[name][rows].detach().cpu().numpy()

        rollout, trainer = of("rollout_log_probs"), of("old_log_probs")
        if np.array_equal(rollout, trainer):  # the trainer takes the engine's
            return {}
        ids = of("responses") if "responses" in tensors.keys() else None
        group = None if labels.get("uid") is None else [labels["uid"][row] for row in rows]
        verdict = judge(columns(rollout, trainer, of("response_mask"), ids=ids, group=group))
        line = {"step": step, "kind": verdict.name, **vars(verdict)}
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        numbers = {"noise": verdict.noise, "ratio": verdict.ratio, "k3": verdict.kl, "is_noise": verdict.is_healthy}
        return {f"gradloc/mismatch_{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}
