# SPDX-License-Identifier: Apache-2.0
"""``gradloc.TrainerCallback``: a watch for ``transformers.Trainer`` and what is built on it.

Trainer(..., callbacks=[gradloc.TrainerCallback("runs/x")])
"""

import os
from typing import Any

from transformers import TrainerCallback as Base

from ...watch.watch import Watch


class TrainerCallback(Base):
    """Watch a Trainer's model from its first step to its last, with the Trainer's own step numbers.

    Args:
        folder: of the run; None: the Trainer's ``output_dir``.
        action: as of :class:`~...watch.watch.Watch`.
        settings: what else :class:`~...watch.watch.Watch` takes.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, action: str = "observe", **settings: Any):
        self.folder, self.action, self.settings = folder, action, settings
        self.watch: Any = None
        """From the beginning of the training on."""
        self._num_spikes = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        tokenizer = given.get("processing_class") or given.get("tokenizer")
        settings = {"tokenizer": getattr(tokenizer, "tokenizer", tokenizer), **self.settings}
        folder = args.output_dir if self.folder is None else self.folder
        self.watch = Watch(model, None, folder, self.action, **settings)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.watch.note(step=state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._num_spikes += self.watch.metrics.get("gradloc/spikes", 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        """Add the spikes since the last line, and the threshold, to what the Trainer logs."""
        if self.watch is not None and logs is not None and "loss" in logs and self.watch.metrics:
            logs["gradloc/spikes"], self._num_spikes = self._num_spikes, 0.0
            if "gradloc/threshold" in self.watch.metrics:
                logs["gradloc/threshold"] = self.watch.metrics["gradloc/threshold"]

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.watch.close()
