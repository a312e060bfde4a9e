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
"""Diagnosis that must not end the training: failures are logged and counted, and after a few there is no more of it."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Attempts"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

T = TypeVar("T")
_MAX_FAILURES = 3


class Attempts:
    """Runs one kind of diagnosis and counts how often it failed.

    Args:
        what: its name in the log.
    """

    def __init__(self, what: str):
        self.what = what
        self.num_failures = 0

    @property
    def is_over(self) -> bool:
        """Whether it failed too often to be tried again."""
        return self.num_failures >= _MAX_FAILURES

    def run(self, work: Callable[[], T], global_step: int, is_vital: bool = False) -> T | None:
        """Try once.

        Args:
            work: the diagnosis.
            global_step: for the log.
            is_vital: there is no training to protect: every failure is raised.

        Returns:
            What ``work`` returned; None after a failure.

        Raises:
            RayError: when a worker is lost; ranks that wait for each other no one can rescue.
        """
        from ray.exceptions import RayError

        try:
            return work()
        except Exception as error:
            if is_vital or isinstance(error, RayError):
                raise
            self.num_failures += 1
            logger.exception(
                "gradloc: the %s at step %s failed (failure %d of %d before it switches itself off): training goes on",
                self.what,
                global_step,
                self.num_failures,
                _MAX_FAILURES,
            )
            return None
