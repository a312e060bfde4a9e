# SPDX-License-Identifier: Apache-2.0
"""Install the wheel as a user does, where all else is there: no checkout, no PYTHONPATH, nothing downloaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.experiments.environment import VERL09
from tests.adapters.test_without_package import DISTRIBUTED, without_ours
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

TRAIN = f"""
{DISTRIBUTED}
import gradloc
from tests.world.harness import make_batch, make_trainer
forced = "actor_rollout_ref.actor.gradloc.trigger.force_step=2"
trainer = make_trainer(["+gradloc=observe", forced], sys.argv[1])
found = [len(trainer.update(make_batch(seed=seed))["events"]) for seed in range(3)]
print(found, gradloc.__file__)
"""
REPORT = ("jinja2", "matplotlib", "rich")
"""Packages that the report needs, and training does not."""
LOADED = "import sys, verl; print(*[name for name in sys.modules if name.startswith('gradloc.') and 'plugin' in name])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def pip(python: str | Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stderr


def clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def site_of(python: str | Path) -> Path:
    return next(Path(python).parents[1].glob("lib/python*/site-packages"))


def environment(python: str | Path, folder: Path, *what: str | Path) -> Path:
    """A Python that has the packages of another one but for those of the report, and what pip is told to install."""
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    made = folder / "venv" / "bin" / "python"
    site, others = site_of(made), without_ours(site_of(python), folder / "others", *REPORT)
    (site / "others.pth").write_text(f"{others}\n{folder / 'verl'}\n")
    pip(made, "install", "--no-deps", "--no-index", *map(str, what))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gradloc").rglob("*.*") if path.suffix != ".pyc"}
    expected = files - {"gradloc/conf/search_path.py"} | {"hydra_plugins/gradloc.py"}
    assert len(expected) > 100 and [path for path in expected if not (site / path).is_file()] == []
    return made


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder, env=clean(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_verl_07_is_patched_and_trains_and_is_reported_on_by_what_was_installed(base_tree, tmp_path):
    python = environment(sys.executable, tmp_path, "--no-build-isolation", ROOT)
    shutil.copytree(base_tree, tmp_path / "verl")
    run(tmp_path, python.parent / "gradloc-patch", "--repo", tmp_path / "verl")
    said = run(tmp_path, python, "-c", TRAIN, tmp_path / "events").splitlines()[-1]
    assert said == f"[0, 1, 0] {site_of(python)}/gradloc/__init__.py"
    for name in REPORT:
        (tmp_path / "others" / name).symlink_to(site_of(sys.executable) / name)
    run(tmp_path, python.parent / "gradloc-report", tmp_path / "events", "-o", tmp_path / "report.html")
    assert "<script" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not VERL09.python.exists(), reason="scripts/test.sh verl09 makes its environment")
def test_beside_the_pins_of_verl_09_it_is_found_by_verl_and_by_hydra(wheel, tmp_path):
    python = environment(VERL09.python, tmp_path, wheel)
    assert "gradloc.adapters.verl09.plugin" in run(tmp_path, python, "-c", LOADED).split()
    module = ["-m", "verl.trainer.main_ppo", "+gradloc=on", "--cfg", "job"]
    shown = run(tmp_path, python, *module, "--package", "actor_rollout_ref.actor.gradloc")
    assert "enable: true" in shown and "mode: observe" in shown
