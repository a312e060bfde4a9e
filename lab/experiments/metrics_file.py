# SPDX-License-Identifier: Apache-2.0
"""Makes verl's `file` logger usable: `trainer.logger=[console,file]` fails at the first step as is.

With `trainer.balance_batch=True` (verl's default) the metrics hold torch scalars, and verl 0.7.0
hands them to `json.dumps`: "Object of type Tensor is not JSON serializable". It also keeps lines in
a buffer until the run ends. Load with `VERL_USE_EXTERNAL_MODULES=lab.experiments.metrics_file`.
"""

from verl.utils import tracking

_log = tracking.FileLogger.log


def log(self, data, step):
    """With a plain number for each torch or numpy scalar, and on disk at once."""
    _log(self, {key: value.item() if hasattr(value, "item") else value for key, value in data.items()}, step)
    self.fp.flush()


tracking.FileLogger.log = log
