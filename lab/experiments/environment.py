# SPDX-License-Identifier: Apache-2.0
"""Make what experiments run in: Python environments, patched copies of verl, and models with their data.

All of it is kept under `.gradloc/`. A folder is named after, or stamped with, a hash of its sources and is made again
only when that changes. Each is complete or absent. Standard library only.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lab.experiments.errors import ExperimentError
from lab.experiments.target import REPO, Target, output_of

CACHE = REPO / ".gradloc"
MANIFEST = REPO / "patches" / "manifest.json"
DEFAULT_VERL = "0.7.0"
SUPPORTED = ((3, 10), (3, 11), (3, 12))  # numpy 1.26.4, which verl 0.7.0 needs, has no wheel for later ones
UNUSED_S = 24 * 3600.0


@dataclass(frozen=True)
class Environment:
    """A Python environment with pinned packages, in a folder under `.gradloc/`."""

    name: str
    """The folder's name."""
    requirements: tuple[Path, ...]
    """Requirements files; the first one pins torch."""
    size: str
    """Time and disk space, shown to the user who waits for it."""
    without_deps: tuple[Path, ...] = ()
    """Requirements files that are installed without their dependencies."""
    variable: str | None = None
    """The environment variable that names an interpreter to use instead, with everything installed."""
    imports: tuple[str, ...] = ("torch.distributed.fsdp",)
    """Modules to import once after the installation, so that they are compiled."""

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> list[str]:
        """The names of the required packages, without their versions."""
        lines = [line for path in self.requirements for line in path.read_text().splitlines()]
        return [line.partition("==")[0] for line in lines if "==" in line and not line.startswith("#")]


def _requirements(*names: str) -> tuple[Path, ...]:
    return tuple(REPO / "requirements" / name for name in names)


_VERLS = ("torch.distributed.fsdp", "datasets", "hydra", "peft", "ray", "tensordict", "torchdata.stateful_dataloader")
_VERLS += ("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3")
DEMO = Environment("venv", _requirements("demo.txt", "report.txt"), "about a minute, 2 GB", imports=_VERLS)
VERL09 = Environment(
    "venv-verl09",
    _requirements("verl09.txt"),
    "about a minute, 2 GB",
    without_deps=_requirements("megatron.txt"),
    variable="VERL09_PYTHON",
    imports=(*_VERLS, "verl.trainer.main_ppo", "verl.workers.engine_workers"),
)
TRL = Environment(
    "venv-trl",
    _requirements("trl.txt"),
    "about a minute, 2 GB",
    variable="TRL_PYTHON",
    imports=("trl", "torch.distributed.run"),
)
LOOP = Environment("venv-loop", _requirements("loop.txt"), "half a minute, 1 GB", variable="LOOP_PYTHON")
_TRANSFORMERS = ("transformers.trainer", "transformers.models.llama.modeling_llama")
DEEPSPEED = Environment(
    "venv-deepspeed",
    _requirements("deepspeed.txt"),
    "a minute, 1 GB",
    variable="DEEPSPEED_PYTHON",
    imports=("deepspeed", *_TRANSFORMERS),
)
LLAMAFACTORY = Environment(
    "venv-llamafactory",
    _requirements("llamafactory.txt"),
    "two minutes, 2 GB",
    without_deps=_requirements("llamafactory-alone.txt"),
    variable="LLAMAFACTORY_PYTHON",
    imports=_TRANSFORMERS,
)
SWIFT = Environment(
    "venv-swift",
    _requirements("swift.txt"),
    "two minutes, 2 GB",
    variable="SWIFT_PYTHON",
    imports=("swift.pipelines", *_TRANSFORMERS),
)
VLLM = replace(VERL09, name="venv-vllm", size="some minutes, 4 GB", without_deps=_requirements("vllm.txt"))


def report(line: str) -> None:
    """Print a line of progress on stderr at once; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def ensure_python(environment: Environment = DEMO) -> str:
    """Return the interpreter of an environment, which is made or updated if need be.

    Raises:
        ExperimentError: if no supported Python is found or pip cannot install the packages.
    """
    given = environment.variable and os.environ.get(environment.variable)
    if given:
        return given
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{environment.name}.lock", "w") as lock:  # two runs in a new clone would install over each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ensure_packages(environment)
        _ensure_gradloc(environment)
    return str(environment.python)


def _ensure_packages(environment: Environment) -> None:
    stamp = environment.folder / "requirements.sha256"
    content = [path.read_text() for path in (*environment.requirements, *environment.without_deps)]
    digest = hashlib.sha256("".join(content).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text().strip() == digest and environment.python.exists():
        return
    base = supported_python()
    report(f"making an environment in {environment.folder} (once: {environment.size})")
    shutil.rmtree(environment.folder, ignore_errors=True)
    output_of([base, "-m", "venv", str(environment.folder)], "python -m venv failed: install Python's venv module")
    torch = next(line for line in content[0].splitlines() if line[:7] == "torch==")
    report(f"  {torch}")
    _install(environment, torch)
    report(f"  the other packages of {' and '.join(path.name for path in environment.requirements)}")
    _install(environment, *(word for path in environment.requirements for word in ("-r", str(path))))
    for path in environment.without_deps:
        report(f"  those of {path.name}")
        _install(environment, "--no-deps", "-r", str(path))
    report("  what is imported first")
    code = "import contextlib, importlib, sys\nfor name in sys.argv[1:]:\n with contextlib.suppress(Exception): "
    command = [str(environment.python), "-c", f"{code}importlib.import_module(name)", *environment.imports]
    subprocess.run(command, capture_output=True, check=False)  # a failure here costs only time later
    stamp.write_text(digest + "\n")  # written last, so that an interrupted installation starts again


def _ensure_gradloc(environment: Environment) -> None:
    """Install this repository in editable mode, for verl's plug-in, Hydra and the patch."""
    stamp = environment.folder / "gradloc.sha256"
    declared = [REPO / "pyproject.toml", REPO / "gradloc" / "conf" / "search_path.py"]
    digest = hashlib.sha256(b"".join([str(REPO).encode(), *(path.read_bytes() for path in declared)])).hexdigest()
    if stamp.is_file() and stamp.read_text().strip() == digest:
        return
    report("  gradloc itself")
    before = [str(environment.python), "-m", "pip", "uninstall", "-y", "-q", "gradloc-verl"]  # its name before 0.5.0
    subprocess.run(before, capture_output=True, check=False)
    _install(environment, "--no-deps", "-e", str(REPO))
    stamp.write_text(digest + "\n")


def _install(environment: Environment, *words: str) -> None:
    # --no-compile: most modules are never imported, and compiling all of them takes longer than the rest
    pip = [str(environment.python), "-m", "pip", "install", "--no-compile"]
    pip += ["--disable-pip-version-check", "--no-input", "-q"]
    output_of([*pip, *words], "pip could not install the demo's packages: check the connection, then run it again")


def supported_python() -> str:
    """Return a Python that the pinned packages support: this one, else the newest on PATH."""
    if sys.version_info[:2] in SUPPORTED:
        return sys.executable
    for major, minor in reversed(SUPPORTED):
        found = shutil.which(f"python{major}.{minor}")
        if found:
            return found
    versions = " or ".join(".".join(map(str, version)) for version in SUPPORTED)
    raise ExperimentError(
        f"the demo's pinned packages need Python {versions}, and this is "
        f"{'.'.join(map(str, sys.version_info[:2]))}: install one of them, or set PYTHON to an "
        "interpreter that has the packages of requirements/demo.txt."
    )


def patched_copy(verl: str = DEFAULT_VERL) -> Target:
    """Return the patched copy of a verl version, which may not exist yet.

    Raises:
        ExperimentError: if there is no patch for that version.
    """
    if not MANIFEST.is_file():
        raise ExperimentError(
            f"{MANIFEST} is missing, so there is no patch to apply: make it with\n    bash {REPO / 'make_patch.sh'}"
        )
    patches = {entry["base"].removeprefix("v"): entry for entry in json.loads(MANIFEST.read_text())["patches"]}
    if verl not in patches:
        raise ExperimentError(f"there is no patch for verl {verl}: there is one for {', '.join(patches)}.")
    return Target(CACHE / f"verl-{patches[verl]['sha256'][:12]}", f"verl {verl}, the demo's own patched copy")


def ensure_patched_copy(python: str, verl: str = DEFAULT_VERL) -> Path:
    """Return the folder of `patched_copy(verl)`, which is made if need be.

    Args:
        python: an interpreter with pip, which fetches verl's source archive.
        verl: the version.

    Raises:
        ExperimentError: if verl cannot be fetched or the patch does not apply.
    """
    target = patched_copy(verl).path
    if target.is_dir():
        os.utime(target)  # marks it as in use
        return target
    prune_patched_copies()
    report(f"getting verl {verl} and patching a copy of it")
    fetch = ["bash", str(REPO / "make_patch.sh"), "--base-tree", f"v{verl}"]
    base = output_of(fetch, f"verl {verl} could not be fetched")

    def fill(folder: Path) -> None:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        apply = [python, str(REPO / "apply_patch.py"), "--repo", str(folder)]
        output_of(apply, f"the patch could not be applied to verl {verl}")

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


def prune_patched_copies() -> None:
    """Delete patched copies that no run used for a day: every edit of the patch makes another one."""
    for path in CACHE.glob("verl-*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting it
            if time.time() - path.stat().st_mtime > UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)


def ensure_material(python: str, module: str) -> Path:
    """Return the folder with an experiment's model and data, which is made if need be.

    Args:
        python: an interpreter with the demo's packages.
        module: the builder; `python -m MODULE --cache FOLDER` prints the folder that it made.
    """
    report("model, tokenizer and data")
    command = [python, "-m", module, "--cache", str(CACHE)]
    return Path(output_of(command, "model and data could not be built", stderr=None))
