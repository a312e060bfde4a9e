# SPDX-License-Identifier: Apache-2.0
"""Fix verl's `file` logger: without this, `trainer.logger=[console,file]` fails at the first step.

With `trainer.balance_batch=True` (verl's default) the metrics hold torch scalars, and verl 0.7.0
hands them to `json.dumps`: "Object of type Tensor is not JSON serializable". It also keeps lines in
a buffer until the run ends. Load with `VERL_USE_EXTERNAL_MODULES=lab.experiments.metrics_file`.
"""

from verl.utils import tracking

_log = tracking.FileLogger.log


def log(self, data, step):
    """Log plain numbers in place of torch and numpy scalars, and flush."""
    _log(self, {key: value.item() if hasattr(value, "item") else value for key, value in data.items()}, step)
    self.fp.flush()


tracking.FileLogger.log = log
