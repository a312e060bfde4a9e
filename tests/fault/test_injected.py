# SPDX-License-Identifier: Apache-2.0
"""A failure at any line of looking for the link leaves weights, moments, gradients and random numbers as they were."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gradloc.fault import find, reference, updates
from gradloc.loop.localizer import Localizer, _read
from gradloc.search import weights
from lab.benchmarks import links
from tests.fault.test_links import ATTEMPTS, trained

FILES = {Path(module.__file__ or "").as_posix() for module in (find, updates, reference, weights)}
RESTORES = "__exit__"  # of MovedWeights: a device that cannot copy weights back cannot train either
Line = tuple[str, int]


def state(made: links.Run) -> str:
    """Return the sha256 of the weights, the optimizer's state, the gradients and the random numbers."""
    params = [*made.model.parameters()]
    moments = [value for each in made.optimizer.state.values() for value in each.values()]
    held = [*params, *moments, *(param.grad for param in params), torch.get_rng_state()]
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in held)).hexdigest()


def traced(call: Callable[[], Any], at_line: Callable[[Line], None]) -> None:
    """Call a function, and another before each line of :data:`FILES` that it reaches."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == RESTORES:
            return None
        if event == "line":
            at_line((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "learning_rate",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("token", "weight_decay", "lost_moments")),
        pytest.param("flipped_weight", marks=pytest.mark.slow),
    ],
)
def test_a_failure_at_any_line_leaves_the_step_as_it_was(fault, tmp_path):
    made = trained(links.HEALTHY, folder=str(tmp_path), trigger={"floor": 2.0, "cap": 2.5})
    real, injected, wrong = Localizer._look_into, list[Line](), list[Line]()

    def look_into(self: Localizer, *given: Any) -> Any:
        self._learn_of_updates(_read(self.updates.open))  # which a look does once
        before, lines = state(made), dict[Line, None]()

        def look() -> None:
            real(self, *given)
            self.events.clear(), self.outcomes.clear()
            self._num_to_write = 0

        traced(look, lambda line: lines.setdefault(line))
        for line in lines:
            self.num_failures = 0

            def fail(reached: Line, line: Line = line) -> None:
                if reached == line:
                    raise RuntimeError("injected")

            traced(look, fail)
            injected.append(line)
            if state(made) != before or self.num_failures != 1:
                wrong.append(line)
        return real(self, *given)

    made.plant(fault, False, ATTEMPTS.get(fault, 0))
    with mock.patch.object(Localizer, "_look_into", look_into):
        for _ in range(2):
            made.take()
    assert made.watch is not None
    made.watch.close()
    assert len(injected) > 50
    assert not wrong, sorted({f"{Path(name).name}:{number}" for name, number in wrong})
