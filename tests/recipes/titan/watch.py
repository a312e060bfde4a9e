# SPDX-License-Identifier: Apache-2.0
"""Watch torchtitan's trainer from the step on at which its model has learned to count; imported by its own setting."""

import os
import sys
from typing import Any

import gradloc
from tests.recipes.titan import LEARNED

Trainer = sys.modules["__main__"].Trainer  # torchrun runs torchtitan.train as the main module
train_step = Trainer.train_step


def watched_step(self: Any, data_iterator: Any) -> None:
    if self.step == LEARNED:
        settings = {"trigger": {"tau": 2.0}}
        self.watch = gradloc.Watch(self.model_parts[0], folder=os.environ["GRADLOC_TITAN_FOLDER"], **settings)
    train_step(self, data_iterator)


Trainer.train_step = watched_step
