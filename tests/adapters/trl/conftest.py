# SPDX-License-Identifier: Apache-2.0
"""TRL in an environment of its own, `scripts/test.sh trl`; in others nothing here is collected."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.world import World

collect_ignore_glob = [] if find_spec("trl") else ["*.py"]
SAME = ("weights", "optimizer", "scheduler", "rng")
"""Parts of what a run leaves behind that must be the same, bit for bit."""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``run(name, **given)``: :func:`harness.run` in this process; events are in ``tmp_path / "watched"``."""
    from tests.adapters.trl import harness

    return lambda name, folder="", **given: harness.run(name, str(tmp_path / (folder or name)), **given)


@pytest.fixture
def run_on_two(world: World, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run :func:`harness.run` on two ranks; returns each rank's answer."""
    return lambda name, folder="", **given: world.run(
        "tests.adapters.trl.harness.run", name=name, folder=str(tmp_path / (folder or name)), **given
    )


def named_in(events: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Step, row and position of every token that is named."""
    tokens = [
        (event["step"]["global_step"], c["row"], p)
        for event in events
        for c in event["culprits"]
        for p in c["positions"]
    ]
    return sorted(tokens)


def check_harmless(run: Callable[..., Any], gradloc: dict[str, Any], action: dict[str, Any], **case: Any) -> list[Any]:
    """On each rank ``observe`` is TRL's own run and ``mask`` the run without the token; returns what was observed."""

    def ranks(*names: str, **given: Any) -> list[dict[str, Any]]:
        found = run(*names, **case, **given)
        return found if isinstance(found, list) else [found]

    stock, without, observed = ranks("stock"), ranks("without"), ranks("watched", gradloc=gradloc)
    masked = ranks("watched", "masked", gradloc={**gradloc, "action": {"mode": "mask", **action}})
    assert not any(rank["error"] for rank in stock + without + observed + masked)
    for rank in range(len(stock)):
        assert [observed[rank][key] for key in SAME] == [stock[rank][key] for key in SAME], "observe"
        assert [masked[rank][key] for key in SAME] == [without[rank][key] for key in SAME], "mask"
        assert masked[rank]["weights"] == masked[0]["weights"] != stock[rank]["weights"], "the plant mattered"
    return observed
