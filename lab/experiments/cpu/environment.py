# SPDX-License-Identifier: Apache-2.0
"""Makes what the demo runs in: Python environments, and a patched copy of a verl that there is a patch for.

They lie under `.gradloc/` and are kept: a folder is named after, or stamped with, a hash of what it
was made from, and made again only when that changes. Each is complete or absent, never in between.
Standard library only.
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
from lab.experiments.target import REPO, Target

CACHE = REPO / ".gradloc"
MANIFEST = REPO / "patches" / "manifest.json"
DEFAULT_VERL = "0.7.0"
# numpy 1.26.4, which verl 0.7.0 needs, has no wheel above.
SUPPORTED = ((3, 10), (3, 11), (3, 12))
UNUSED_S = 24 * 3600.0


@dataclass(frozen=True)
class Environment:
    """A Python environment with pinned packages, a folder under `.gradloc/`."""

    name: str
    """The folder's."""
    requirements: tuple[Path, ...]
    """Lists of packages; the first has torch."""
    size: str
    """For the user who waits for it: time and disk."""
    beside: tuple[Path, ...] = ()
    """Lists of packages that are installed without what they ask for."""
    variable: str | None = None
    """The environment variable that names an interpreter to use instead, with everything installed."""
    imports: tuple[str, ...] = ("torch.distributed.fsdp",)
    """Modules that its processes begin with: imported once when it is made, they are compiled."""

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> list[str]:
        """Those of the lists, in whatever version."""
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
    beside=_requirements("megatron.txt"),
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
    beside=_requirements("llamafactory-alone.txt"),
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
VLLM = replace(VERL09, name="venv-vllm", size="some minutes, 4 GB", beside=_requirements("vllm.txt"))


def report(line: str) -> None:
    """Print a line of progress on stderr at once; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def ensure_python(environment: Environment = DEMO) -> str:
    """Returns the interpreter of an environment with the pinned packages, made if need be.

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
    content = [path.read_text() for path in (*environment.requirements, *environment.beside)]
    digest = hashlib.sha256("".join(content).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text().strip() == digest and environment.python.exists():
        return
    base = supported_python()
    report(f"making an environment in {environment.folder} (once: {environment.size})")
    shutil.rmtree(environment.folder, ignore_errors=True)
    step([base, "-m", "venv", str(environment.folder)], "python -m venv failed: install Python's venv module")
    torch = next(line for line in content[0].splitlines() if line[:7] == "torch==")
    report(f"  {torch}")
    _install(environment, torch)
    report(f"  the other packages of {' and '.join(path.name for path in environment.requirements)}")
    _install(environment, *(word for path in environment.requirements for word in ("-r", str(path))))
    for path in environment.beside:
        report(f"  those of {path.name}")
        _install(environment, "--no-deps", "-r", str(path))
    report("  what is imported first")
    tried = "import contextlib, importlib, sys\nfor name in sys.argv[1:]:\n with contextlib.suppress(Exception): "
    command = [str(environment.python), "-c", f"{tried}importlib.import_module(name)", *environment.imports]
    subprocess.run(command, capture_output=True, check=False)  # only so that it takes less time later
    # Written last: an interrupted installation is begun again.
    stamp.write_text(digest + "\n")


def _ensure_gradloc(environment: Environment) -> None:
    """Installs this repository, which verl, Hydra and the patch find then; edits need no new installation."""
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
    # Byte code is written as a module is imported; most never are, and to compile all takes longer than the rest.
    pip = [str(environment.python), "-m", "pip", "install", "--no-compile"]
    pip += ["--disable-pip-version-check", "--no-input", "-q"]
    step([*pip, *words], "pip could not install the demo's packages: check the connection, then run it again")


def supported_python() -> str:
    """A Python that the pins exist for: the running one, else the first found on PATH."""
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
    """The copy of that version of verl with the present patch, whether or not it is there yet.

    Raises:
        ExperimentError: if there is no patch for it.
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
    """The folder of `patched_copy(verl)`, made if need be.

    Args:
        python: an interpreter that has pip, which fetches verl's source archive.
        verl: its version.

    Raises:
        ExperimentError: if verl cannot be fetched or the patch does not apply.
    """
    target = patched_copy(verl).path
    if target.is_dir():
        os.utime(target)  # in use
        return target
    prune_patched_copies()
    report(f"getting verl {verl} and patching a copy of it")
    fetch = ["bash", str(REPO / "make_patch.sh"), "--base-tree", f"v{verl}"]
    base = step(fetch, f"verl {verl} could not be fetched").strip()

    def fill(folder: Path) -> None:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        apply = [python, str(REPO / "apply_patch.py"), "--repo", str(folder)]
        step(apply, f"the patch could not be applied to verl {verl}")

    make_whole(target, fill)
    return target


def make_whole(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder that is complete or absent: `fill` gets another one, which is renamed at the end."""
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
    """Deletes the copies that no run has begun with for a day: every edit of the patch makes another."""
    for path in CACHE.glob("verl-*"):
        with contextlib.suppress(FileNotFoundError):  # another process is at it, too
            if time.time() - path.stat().st_mtime > UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)


def ensure_material(python: str, module: str) -> Path:
    """Returns the folder with an experiment's model and data, made if need be.

    Args:
        python: an interpreter with the demo's packages.
        module: what builds them: `python -m MODULE --cache FOLDER` prints their folder within it.
    """
    command = [python, "-m", module, "--cache", str(CACHE)]
    report("model, tokenizer and data")
    return Path(step(command, "model and data could not be built", show=True).strip())


def step(command: list[str], problem: str, show: bool = False) -> str:
    """Runs one command from the repository's root and returns what it printed.

    Args:
        command: the arguments.
        problem: the sentence to say when it fails.
        show: let its stderr through, for progress.

    Raises:
        ExperimentError: if it fails; the last thing it said goes with the sentence.
    """
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command,
        cwd=REPO,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + (done.stderr or "")).strip().splitlines()
        raise ExperimentError(f"{problem}.\n    {said[-1] if said else ' '.join(command)}")
    return done.stdout
