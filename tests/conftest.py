# SPDX-License-Identifier: Apache-2.0
"""What every room shares: the pinned verl, the same with our patch on it, and the worlds of ranks.

A world is started once for the whole run, whichever folders use it. tests/trainers.py says what runs on which trainer.
"""

import compileall
import fcntl
import gc
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("tests.adapters.conformance.layouts.checks")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads cost more than they gain

from lab.experiments.environment import CACHE, ensure_patched_copy  # noqa: E402
from lab.experiments.verl09 import ENVIRONMENT  # noqa: E402
from patchkit.build import bases, ensure_base  # noqa: E402
from tests import trainers  # noqa: E402
from tests.trainers import TRAINER, VERL07  # noqa: E402
from tests.trainers import VERSION as VERL  # noqa: E402
from tests.world import DEVICE, World  # noqa: E402

if DEVICE != "cpu":  # what is held bit for bit needs kernels that repeat
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]  # the first draw makes tables, also on a machine that is busy
    settings.register_profile("gradloc", deadline=None, derandomize=True, max_examples=40, suppress_health_check=slow)
    settings.load_profile("gradloc")

if TRAINER == "verl 0.9" and DEVICE == "cpu":  # what its workers need on a machine without an accelerator
    os.environ.update(ENVIRONMENT)

# Who asks for one of these needs verl; together they stay in one process, which has each once.
WORLDS = {"worlds", "doomed"}
IN_PROCESS = {"verl"}
FIRST = ["trainer", "worlds", "worlds of features"]
"""The longest groups: one process begins with the first and goes on with the third, the other has the second."""
FIRST += [f"tests/{name}.py" for name in ("watch/test_kinds", "watch/test_losses", "report/test_hostile")]
LONG = """
benchmarks/test_trigger core/test_memory experiments/explosion/test_summary experiments/kk/test_language
experiments/llm/test_natural experiments/test_launch repo_checks/test_figures repo_checks/test_imports
repo_checks/test_pages loop/test_localizer mismatch/test_bugs mismatch/test_columns mismatch/test_files
report/logs/test_collection report/logs/test_given report/logs/test_made report/pages/test_document
report/pages/test_page reward/test_answers reward/test_pool search/test_auto search/test_step_causes
search/test_candidates search/test_cost search/test_cures search/test_find search/test_overflow
search/test_share search/test_unrepeatable notify/test_notify watch/test_demo watch/test_price
watch/test_ranks watch/test_semantics watch/test_words
"""
"""Modules that need no verl and yet take most of the time of those that do not: `make quick` is to take a minute."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out, and say which tests pytest-xdist has to keep in one process."""
    groups = {}
    trainers.mark(items)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        room = item.path.relative_to(ROOT / "tests").parts
        is_09 = room[:2] == ("adapters", "verl09")
        if is_09:
            item.add_marker(pytest.mark.verl09)
        if item.get_closest_marker("e2e"):
            group = FIRST[0]
        elif is_09 or TRAINER != VERL07 and fixtures & WORLDS:
            group = "/".join(room[:-1])  # an environment of its own: each folder in one process
        elif fixtures & WORLDS:
            is_of_actor = room[0] == "adapters" and "single" not in fixtures or "unpatched_world" in fixtures
            group = FIRST[1 if is_of_actor else 2]  # each kind of world starts in one of the two
        elif fixtures & IN_PROCESS:
            group = "in-process"
        else:
            group = item.path.relative_to(ROOT).as_posix()
        is_long = "/".join(room).removesuffix(".py") in LONG.split()
        if is_long or fixtures & (WORLDS | IN_PROCESS) or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.xdist_group(group))
        groups[item] = group
    last = len(FIRST)  # and before what is short all that is not, so that both processes end together
    order = {item: FIRST.index(group) if group in FIRST else last for item, group in groups.items()}
    items.sort(key=lambda item: (order[item], item.get_closest_marker("full") is None))


def pytest_collection_finish() -> None:
    """Keep what the imports made out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """The pinned verl, unpacked: a folder with ``verl/`` in it. Read only: copy before editing."""
    return ensure_base(bases()[f"v{VERL}"])


@pytest.fixture(scope="session")
def patched_tree() -> Path:
    """That verl with the patch on it, kept under a name by its hash; or VERL_REPO, which is being edited. Read only."""
    if os.environ.get("VERL_REPO"):
        return Path(os.environ["VERL_REPO"]).resolve()
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "patched.lock", "w") as lock:  # test processes run in parallel
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = ensure_patched_copy(sys.executable)
        compileall.compile_dir(made / "verl", quiet=2)  # so that no process writes byte code into it
    return made


@pytest.fixture(scope="session")
def world_settings(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """``world_settings(is_patched)``: how a `World` is made, of verl 0.7 or the installed trainer."""
    if TRAINER != VERL07:
        return lambda **_: trainers.SETTINGS

    def settings(is_patched: bool = True) -> dict[str, Any]:
        return {"path": (str(request.getfixturevalue("patched_tree" if is_patched else "base_tree")),)}

    return settings


@pytest.fixture(scope="session")
def worlds(world_settings: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., World]]:
    """``worlds(size, is_patched)``: ranks with these settings; each world is made once."""
    made: dict[str, World] = {}

    def get(size: int, **given: Any) -> World:
        settings = world_settings(**given)
        return made.setdefault(f"{size} {settings}", World(size, **settings))  # its first call starts it

    yield get
    for world in made.values():
        world.close()


@pytest.fixture(scope="session")
def world(worlds: Callable[..., World]) -> World:
    """Two ranks on the patched tree."""
    return worlds(2)


@pytest.fixture(scope="session")
def four_ranks(worlds: Callable[..., World]) -> World:
    """Four ranks on the patched tree."""
    return worlds(4)


@pytest.fixture(scope="session")
def single(worlds: Callable[..., World]) -> World:
    """One rank on the patched tree."""
    return worlds(1)


@pytest.fixture(scope="session")
def unpatched_world(worlds: Callable[..., World]) -> World:
    """Two ranks on verl as published."""
    return worlds(2, is_patched=False)


@pytest.fixture
def doomed(world_settings: Callable[..., dict[str, Any]]) -> Iterator[World]:
    """Two ranks on the patched tree that a test may lose."""
    with World(2, **(world_settings() | {"timeout_s": 120})) as world:
        yield world


@pytest.fixture(scope="session")
def bare_world() -> Iterator[World]:
    """Two ranks without any verl, for tests.toy_model."""
    with World(2, preloaded=()) as world:
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


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a command prints."""
    from gradloc.report.cli import main

    def show(*words, columns=300, code=0):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([str(word) for word in words]) == code
        return capsys.readouterr().out

    return show


@pytest.fixture
def refused(capsys):
    """The one line in which a command is refused."""
    from gradloc.report.cli import main

    def refuse(*words):
        capsys.readouterr()  # what came before
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("gradloc: ") and said.err.count("\n") == 1 and said.out == ""
        return said.err

    return refuse
