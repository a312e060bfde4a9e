# SPDX-License-Identifier: Apache-2.0
"""Worlds of processes that hold verl's Megatron engine in some layout."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.world import World

from .layouts import LAYOUTS

HERE = "tests.adapters.verl09.megatron"


class InLayout:
    """A world in which the scenarios of `tests.world` are run with Megatron in one layout."""

    def __init__(self, world: World, layout: str):
        self.world, self.layout = world, layout

    def run(self, scenario: str, **given: Any) -> list[Any]:
        """Call :meth:`World.run` in this layout; a name with a module in front is called directly."""
        if scenario.startswith("tests."):
            return self.world.run(scenario, **given)
        return self.world.run(f"{HERE}.conformance.run", **self._dealt_out(scenario), **given)

    def outcomes(self, scenario: str, **given: Any) -> list[tuple[str, Any]]:
        """Call :meth:`World.outcomes` in this layout."""
        return self.world.outcomes(f"{HERE}.conformance.run", **self._dealt_out(scenario), **given)

    def _dealt_out(self, scenario: str) -> dict[str, Any]:
        return {"scenario": scenario, "dealt_out": LAYOUTS[self.layout].settings}


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> str:
    """The name of one of ``LAYOUTS``."""
    return request.param


@pytest.fixture
def world(worlds: Callable[..., World], layout: str) -> InLayout:
    """As many processes as the layout has."""
    return InLayout(worlds(LAYOUTS[layout].size), layout)


@pytest.fixture
def unpatched_world(world: InLayout) -> InLayout:
    """Give the same world: without spike_detection it takes verl's own engine."""
    return world
