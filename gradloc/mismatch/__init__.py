# SPDX-License-Identifier: Apache-2.0
"""Why the log-probs of the rollout engine and of the trainer differ: the kind, by its fingerprint in two columns.

    >>> import numpy as np
    >>> trainer = np.log(np.random.default_rng(0).uniform(0.05, 1, (8, 100)))
    >>> judge(columns(np.roll(trainer, 1, axis=1), trainer)).name
    'shift'

Numpy alone; neither torch nor a trainer is imported.
"""

from .columns import Columns, MismatchError, columns
from .kinds import KINDS, Kind
from .verdict import Verdict, beyond_noise, judge

__all__ = ["KINDS", "Columns", "Kind", "MismatchError", "Verdict", "beyond_noise", "columns", "judge"]
