# SPDX-License-Identifier: Apache-2.0
"""The installed package: ``gradloc-patch`` and ``gradloc-report`` work from any folder, without a checkout.

python -m pytest tests/patchkit/build/test_package.py -m slow      installs it into an empty environment (network)
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.patchkit import world

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/demo"
SOURCES = ("gradloc", "patchkit", "patches", "verl_overrides")


def built(source: Path, folder: Path, kind: str) -> Path:
    """Builds the wheel or the sdist of the sources at ``source`` into ``folder``."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_package_the_applier_and_the_patches_and_beside_gradloc_hydras_plugin_alone(wheel):
    found = names(wheel)
    assert {name for name in found if not name.startswith("gradloc")} == {"hydra_plugins/gradloc.py"}
    for path in (ROOT / "patches").rglob("*.*"):
        assert f"gradloc/patches/{path.relative_to(ROOT / 'patches').as_posix()}" in found
    for path in (ROOT / "patchkit").rglob("*.py"):
        assert f"gradloc/patchkit/{path.relative_to(ROOT / 'patchkit').as_posix()}" in found
    assert {"gradloc/report/cli.py", "gradloc/replay/__main__.py"} <= found
    assert not [name for name in found if name.endswith(".pyc")]


def test_a_wheel_built_from_the_sdist_is_the_same_wheel(wheel, tmp_path):
    archive = built(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    for name in SOURCES:
        assert (tree / name).is_dir(), name
    again = built(tree, tmp_path / "wheel", "wheel")
    assert again.name == wheel.name and names(again) == names(wheel)


def test_the_unpacked_wheel_patches_a_tree_and_takes_the_patch_off(wheel, base_tree, tmp_path):
    """A bare Python (no site, no environment) that finds the wheel's content and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    before = world.picture(root)
    script = (
        f"import sys; sys.path.append({str(tmp_path / 'site')!r}); sys.argv[0] = 'gradloc-patch'\n"
        "from gradloc.patchkit.apply.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-I", "-S", "-c", script, "--repo", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"next:     gradloc-patch --repo {root} --reverse" in done.stdout
    assert (root / "verl/gradloc/core").is_dir()
    assert subprocess.run([*command, "--reverse"], capture_output=True, cwd=tmp_path).returncode == 0
    assert world.picture(root).keys() == before.keys()


@pytest.mark.slow
def test_pip_install_into_an_empty_environment_gives_both_commands(base_tree, tmp_path):
    root = Path(shutil.copytree(base_tree, tmp_path / "verl"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*command: object) -> str:
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "env")
    run("env/bin/python", "-m", "pip", "install", "-q", ROOT)
    version = run("env/bin/python", "-c", "import gradloc, gradloc.report, gradloc.replay; print(gradloc.__version__)")
    assert run("env/bin/gradloc-report", "--version") == version
    assert f"applied {version.strip()}" in run("env/bin/gradloc-patch", "--repo", root)
    assert json.loads(run("env/bin/gradloc-patch", "--repo", root, "--status", "--json"))["state"] == "APPLIED"
    assert "culprit" in run("env/bin/gradloc-report", EXAMPLE)
    run("env/bin/gradloc-patch", "--repo", root, "--reverse")
