# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the core and the features know no trainer, the adapters know one each, and nothing looks up."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gradloc"
TRAINERS = ("verl", "ray", "trl", "transformers", "accelerate", "tensordict")

RANKS = {
    "checks": 0,
    "keys": 0,
    "private_api": 0,
    "record": 0,
    "trigger": 1,
    "core": 1,
    "search": 2,
    "forecast": 2,
    "fault": 3,
    "explain": 1,
    "notify": 3,
    "mismatch": 2,
    "loop": 4,
    "analysis": 5,
    "health": 5,
    "replay": 5,
    "report": 9,
    "command": 10,
    "reweighting": 5,
    "conf": 0,
    "rollout_filter": 5,
    "stabilize": 5,
    "config": 6,
    "names": 7,
    "watch": 7,
    "adapters": 8,
    "trl": 9,
}
"""A room imports from those of a lower rank, and from these of its own:"""
NEIGHBOURS = {
    "analysis": {"rollout_filter"},  # groups of rollouts
    "health": {"rollout_filter"},  # groups of rollouts
}
ENTRIES = {"report.__main__": {"command"}}
"""``python -m gradloc.report`` is the command."""
MODELS = {"replay.model": {"transformers"}}
"""A replay runs a plain model."""

WITHOUT_TORCH = ("trigger", "report", "health", "record", "explain", "mismatch")
DRAWING = ("torch", "matplotlib", "rich", "jinja2", "pyarrow")
ALL = (*DRAWING, "numpy")


def module_name(path: Path) -> str:
    """``core.probe`` for gradloc/core/probe.py; a package's ``__init__`` has its folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> set[str]:
    """Every module that an import statement of this one names, at any depth; ours begin with a dot."""
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.add("." + (whole if whole in MODULES else ".".join(base)))
    return found


def room(name: str) -> str:
    return name.split(".")[0]


def adapter(name: str) -> str:
    """``verl09`` for adapters.verl09.step; "" outside of the adapters."""
    return (name.split(".") + [""])[1] if room(name) == "adapters" else ""


def test_the_walk_sees_every_import_at_any_depth():
    assert ".health.config" in imports("health.judge")
    assert ".rollout_filter.groups" in imports("health.monitor"), "an import inside a function"
    assert ".stabilize.config" in imports("config")
    assert "verl.utils.device" in imports("adapters.verl07.step")


def test_every_room_has_a_rank():
    assert {room(name) for name in MODULES if name} <= RANKS.keys()


def test_no_trainer_is_imported_outside_of_the_adapters():
    outside = [name for name in MODULES if room(name) != "adapters"]
    found = {name: {each.split(".")[0] for each in imports(name)} & {*TRAINERS} for name in outside}
    assert {name: trainers for name, trainers in found.items() if trainers} == MODELS


def may_import(name: str, found: str) -> bool:
    """Whether a module may import something: inside of the package by relative names, and downwards."""
    here, there = room(name), room(found[1:]) if found.startswith(".") else ""
    if not there or there == here:
        return not found.startswith("gradloc")
    return RANKS[there] < RANKS[here] or there in NEIGHBOURS.get(here, ()) or there in ENTRIES.get(name, ())


def test_imports_run_downwards():
    assert [(name, found) for name in MODULES for found in imports(name) if not may_import(name, found)] == []


def test_an_adapter_knows_no_other_but_what_verls_have_in_common():
    for name in (name for name in MODULES if adapter(name)):
        here = adapter(name)
        there = {adapter(found[1:]) for found in imports(name) if found.startswith(".")} - {"", here}
        may = {"verl_common"} if here.startswith("verl") and here != "verl_common" else set()
        assert there <= may, name


IMPORT_ALL = """
import importlib, sys

absent = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
assert not absent & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.full
def test_everything_but_the_adapters_imports_where_no_trainer_is_installed():
    names = [name for name in MODULES if name and room(name) not in ("adapters", "trl", "conf")]
    import_all([f"gradloc.{name}" for name in names], TRAINERS, ROOT)


@pytest.mark.parametrize(
    ("rooms", "absent"), [(WITHOUT_TORCH, ("torch",)), (("health",), ALL), (("mismatch",), DRAWING)]
)
def test_what_reads_a_run_needs_no_torch_and_what_judges_it_nor_what_draws(rooms, absent):
    names = [name for name in MODULES if room(name) in rooms]
    import_all([f"gradloc.{name}" for name in names], (*TRAINERS, *absent), ROOT)


def import_all(names: list[str], absent: tuple[str, ...], where: Path) -> None:
    names = [name for name in names if not name.endswith("__main__")]  # would run the command
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(absent), *names],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(where), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
