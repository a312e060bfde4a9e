# SPDX-License-Identifier: Apache-2.0
"""Makes verl's `file` logger usable: `trainer.logger=[console,file]` fails at the first step as is.

With `trainer.balance_batch=True` (verl's default) the metrics hold torch scalars, and verl 0.7.0
hands them to `json.dumps`: "Object of type Tensor is not JSON serializable". It also keeps lines in
a buffer until the run ends. Load with `VERL_USE_EXTERNAL_MODULES=experiments.metrics_file`.
"""

from verl.utils import tracking


def to_number(value):
    """A plain number for a torch or numpy scalar; anything else stays what it is."""
    return value.item() if hasattr(value, "item") else value


def install() -> None:
    """Replaces `FileLogger.log` by one that converts scalars and writes each step at once."""
    original = tracking.FileLogger.log
    if getattr(original, "_gradloc", False):
        return

    def log(self, data, step):
        original(self, {key: to_number(value) for key, value in data.items()}, step)
        self.fp.flush()

    log._gradloc = True
    tracking.FileLogger.log = log


install()
