# SPDX-License-Identifier: Apache-2.0
"""What every room shares: the pinned verl, the same with our patch on it, and the worlds of ranks.

A world is started once for the whole run, whichever folders use it: eleven processes in all.
"""

import compileall
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads cost more than they gain

from experiments.cpu.environment import CACHE, ensure_patched_copy, patched_copy  # noqa: E402
from patchkit.build.base import ensure_base  # noqa: E402
from tests.world import World  # noqa: E402

# Who asks for one of these needs verl; together they stay in one process, which has each once.
WORLDS = {"world", "four_ranks", "single", "unpatched_world"}
IN_PROCESS = {"verl", "reward_score"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out, and say which tests pytest-xdist has to keep in one process."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if item.path.is_relative_to(ROOT / "tests" / "verl_engine"):
            item.add_marker(pytest.mark.verl09)
            group = "verl09"
        elif item.get_closest_marker("e2e"):
            group = "trainer"
        elif fixtures & WORLDS:
            group = "worlds"
        elif fixtures & IN_PROCESS:
            group = "in-process"
        else:
            group = item.path.relative_to(ROOT).as_posix()
        if fixtures & (WORLDS | IN_PROCESS) or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """The pinned verl, unpacked: a folder with ``verl/`` in it. Read only: copy before editing."""
    return ensure_base()


@pytest.fixture(scope="session")
def patched_tree() -> Path:
    """The pinned verl with patches/gradloc.patch on it, kept between runs under a name by its hash. Read only.

    VERL_REPO names a patched checkout to test instead: the one that is being edited.
    """
    if os.environ.get("VERL_REPO"):
        return Path(os.environ["VERL_REPO"]).resolve()
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "patched.lock", "w") as lock:  # test processes run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_patched_copy(sys.executable, report=lambda *_: None)
        tree = patched_copy().path
        compileall.compile_dir(tree / "verl", quiet=2)  # so that no process writes byte code into it
    return tree


def _world(size: int, tree: Path) -> Iterator[World]:
    world = World(size, path=(str(tree),))
    yield world
    world.close()


@pytest.fixture(scope="session")
def world(patched_tree: Path) -> Iterator[World]:
    """Two ranks on the patched tree."""
    yield from _world(2, patched_tree)


@pytest.fixture(scope="session")
def four_ranks(patched_tree: Path) -> Iterator[World]:
    """Four ranks on the patched tree."""
    yield from _world(4, patched_tree)


@pytest.fixture(scope="session")
def single(patched_tree: Path) -> Iterator[World]:
    """One rank on the patched tree."""
    yield from _world(1, patched_tree)


@pytest.fixture(scope="session")
def unpatched_world(base_tree: Path) -> Iterator[World]:
    """Two ranks on verl as published."""
    yield from _world(2, base_tree)


@pytest.fixture(scope="session")
def bare_world() -> Iterator[World]:
    """Two ranks without any verl, for tests.bare."""
    with World(2) as world:
        yield world


@pytest.fixture(scope="session")
def compose(single: World) -> Callable[..., list[Any]]:
    """``compose(overrides, ...)``: the actor's settings in verl's config, or the error, for each list."""
    size = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    read = "tests.world.configs.actor"
    return lambda *cases: single.run("configs.read_all", cases=[size + case for case in cases], read=read)[0]


@pytest.fixture
def dump_dir(tmp_path: Path) -> str:
    """Where a run's events go: absent yet."""
    return str(tmp_path / "gradloc")
