# SPDX-License-Identifier: Apache-2.0
"""Make what experiments run in: Python environments, patched copies of verl, and models with their data.

All of it is kept under `.gradloc/`, in folders that are named after, or stamped with, a hash of their sources. Standard
library only.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.experiments.errors import ExperimentError
from lab.experiments.target import REPO, output_of

CACHE = REPO / ".gradloc"
MANIFEST = REPO / "patches" / "manifest.json"
DEFAULT_VERL = "0.7.0"
SUPPORTED = ((3, 10), (3, 11), (3, 12))  # numpy 1.26.4, which verl 0.7.0 needs, has no wheel for later ones


@dataclass(frozen=True)
class Environment:
    """A Python environment with pinned packages, in a folder under `.gradloc/`."""

    name: str
    """The folder's name."""
    requirements: tuple[str, ...]
    """Files of `requirements/`."""
    without_deps: tuple[str, ...] = ()
    """Files of `requirements/` that are installed without their dependencies."""
    variable: str = ""
    """The environment variable that names an interpreter to use instead, with everything installed; "" for none."""

    @property
    def python(self) -> Path:
        return CACHE / self.name / "bin" / "python"

    @property
    def packages(self) -> list[str]:
        """The names of the required packages, without their versions."""
        lines = [line for name in self.requirements for line in _requirements(name).read_text().splitlines()]
        return [line.partition("==")[0] for line in lines if "==" in line and not line.startswith("#")]


def _requirements(name: str) -> Path:
    return REPO / "requirements" / name


DEMO = Environment("venv", ("demo.txt", "report.txt"))
VERL09 = Environment("venv-verl09", ("verl09.txt",), ("megatron.txt",), "VERL09_PYTHON")
VLLM = Environment("venv-vllm", ("verl09.txt",), ("vllm.txt",), "VERL09_PYTHON")
TRL = Environment("venv-trl", ("trl.txt",), variable="TRL_PYTHON")
LOOP = Environment("venv-loop", ("loop.txt",), variable="LOOP_PYTHON")
DEEPSPEED = Environment("venv-deepspeed", ("deepspeed.txt",), variable="DEEPSPEED_PYTHON")
TITAN = Environment("venv-titan", ("titan.txt",), variable="TITAN_PYTHON")
SWIFT = Environment("venv-swift", ("swift.txt",), variable="SWIFT_PYTHON")
LLAMAFACTORY = Environment(
    "venv-llamafactory", ("llamafactory.txt",), ("llamafactory-alone.txt",), "LLAMAFACTORY_PYTHON"
)


def report(line: str) -> None:
    """Print a line of progress on stderr at once; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def ensure_python(environment: Environment = DEMO) -> str:
    """Return the interpreter of an environment, which is made or updated if need be.

    Raises:
        ExperimentError: if no supported Python is found or pip cannot install the packages.
    """
    if os.environ.get(environment.variable):
        return os.environ[environment.variable]
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / environment.name
    with open(CACHE / f"{environment.name}.lock", "w") as lock:  # two runs in a new clone would install over each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not environment.python.exists():
            shutil.rmtree(folder, ignore_errors=True)
        files = map(_requirements, (*environment.requirements, *environment.without_deps))
        pinned = "".join(path.read_text() for path in files).encode()
        _once(folder / "requirements.sha256", pinned, lambda: _install_packages(environment))
        declared = [REPO / "pyproject.toml", REPO / "gradloc" / "conf" / "search_path.py"]
        content = b"".join([str(REPO).encode(), *(path.read_bytes() for path in declared)])
        _once(folder / "gradloc.sha256", content, lambda: _install_gradloc(environment))
    return str(environment.python)


def _install_packages(environment: Environment) -> None:
    base, folder = supported_python(), CACHE / environment.name
    report(f"making an environment in {folder} (once: some minutes, 1 to 4 GB)")
    shutil.rmtree(folder, ignore_errors=True)
    output_of([base, "-m", "venv", str(folder)], "python -m venv failed: install Python's venv module")
    torch = next(
        line for line in _requirements(environment.requirements[0]).read_text().splitlines() if line[:7] == "torch=="
    )
    _pip_install(environment, torch)  # first and alone: the files say why
    for name in environment.requirements:
        _pip_install(environment, "-r", str(_requirements(name)))
    for name in environment.without_deps:
        _pip_install(environment, "--no-deps", "-r", str(_requirements(name)))


def _install_gradloc(environment: Environment) -> None:
    """Install this repository in editable mode, for verl's plug-in, Hydra and the patch."""
    former = [str(environment.python), "-m", "pip", "uninstall", "-y", "-q", "gradloc-verl"]  # its name before 0.5.0
    subprocess.run(former, capture_output=True, check=False)
    _pip_install(environment, "--no-deps", "-e", str(REPO))


def _pip_install(environment: Environment, *words: str) -> None:
    report(f"  pip install {' '.join(words)}")
    # --no-compile: most modules are never imported, and compiling all of them takes longer than the rest
    pip = [str(environment.python), "-m", "pip", "install", "--no-compile"]
    pip += ["--disable-pip-version-check", "--no-input", "-q"]
    output_of([*pip, *words], "pip could not install the demo's packages: check the connection, then run it again")


def _once(stamp: Path, content: bytes, make: Callable[[], None]) -> None:
    """Call `make`, unless the stamp file holds the content's sha256, which is written afterwards."""
    digest = hashlib.sha256(content).hexdigest()
    if not stamp.is_file() or stamp.read_text().strip() != digest:
        make()
        stamp.write_text(digest + "\n")


def supported_python() -> str:
    """Return a Python that the pinned packages support: this one, else the newest on PATH."""
    if sys.version_info[:2] in SUPPORTED:
        return sys.executable
    for major, minor in reversed(SUPPORTED):
        found = shutil.which(f"python{major}.{minor}")
        if found:
            return found
    versions = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    raise ExperimentError(
        f"the demo's pinned packages need Python {versions}, and this is {sys.version.split()[0]}: install one of "
        "them, or set PYTHON to an interpreter that has the packages of requirements/demo.txt."
    )


def patched_copy() -> Path:
    """Return the folder of the patched copy of verl, which may not exist yet; its name has the patch's sha256.

    Raises:
        ExperimentError: if there is no patch.
    """
    if not MANIFEST.is_file():
        raise ExperimentError(
            f"{MANIFEST} is missing, so there is no patch to apply: make it with\n    bash {REPO / 'make_patch.sh'}"
        )
    (patch,) = json.loads(MANIFEST.read_text())["patches"]
    return CACHE / f"verl-{patch['sha256'][:12]}"


def ensure_patched_copy(python: str) -> Path:
    """Return the folder of `patched_copy()`, which is made if need be.

    Args:
        python: an interpreter with pip, which fetches verl's source archive.

    Raises:
        ExperimentError: if verl cannot be fetched or the patch does not apply.
    """
    target = patched_copy()

    def fill(folder: Path) -> None:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        apply = [python, str(REPO / "apply_patch.py"), "--repo", str(folder)]
        output_of(apply, f"the patch could not be applied to verl {DEFAULT_VERL}")

    if not target.is_dir():
        report(f"getting verl {DEFAULT_VERL} and patching a copy of it")
        fetch = ["bash", str(REPO / "make_patch.sh"), "--base-tree", f"v{DEFAULT_VERL}"]
        base = output_of(fetch, f"verl {DEFAULT_VERL} could not be fetched")
        make_whole(target, fill)
    return target


def make_whole(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that is complete or absent: `fill` writes into a temporary one, which is then renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name.partition('-')[0]}-", dir=target.parent))
    try:
        fill(work)
        work.chmod(0o755)
        work.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def ensure_material(python: str, module: str) -> Path:
    """Return the folder with an experiment's model and data, which is made if need be.

    Args:
        python: an interpreter with the demo's packages.
        module: the builder; `python -m MODULE --cache FOLDER` prints the folder that it made.
    """
    report("model, tokenizer and data")
    command = [python, "-m", module, "--cache", str(CACHE)]
    return Path(output_of(command, "model and data could not be built", stderr=None))
