# SPDX-License-Identifier: Apache-2.0
"""Choose the verl that an experiment runs on, and check that it is patched.

The order: `VERL_REPO`, else the current folder if it is verl, else the experiment's own environment (the demo's patched
copy, or what the Python in use imports).
"""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.experiments.errors import ExperimentError

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """A folder that contains `verl/`, and how it was chosen."""

    path: Path
    origin: str


def is_verl(folder: Path) -> bool:
    """Return whether the folder contains the `verl` package with its trainer."""
    return os.path.isfile(folder / "verl" / "trainer" / "main_ppo.py")


def named(environ, cwd: Path) -> Target | None:
    """Return the verl that the user points at, or None.

    Raises:
        ExperimentError: if `VERL_REPO` is set and is not verl.
    """
    if environ.get("VERL_REPO"):
        path = folder_in(environ, "VERL_REPO")
        if not is_verl(path):
            raise ExperimentError(
                f"VERL_REPO={path} is not verl (no verl/trainer/main_ppo.py in it): "
                "set it to the folder that contains verl/, or unset it."
            )
        return Target(path.resolve(), "VERL_REPO")
    if is_verl(cwd):
        return Target(cwd.resolve(), "the current folder")
    return None


def folder_in(environ, variable: str) -> Path:
    """Return the folder that an environment variable names.

    Raises:
        ExperimentError: if it begins with ~NAME and there is no such user.
    """
    try:
        return Path(environ[variable]).expanduser()
    except RuntimeError:
        raise ExperimentError(
            f"{variable}={environ[variable]} begins with ~ and a name that no user has here: write the whole path."
        ) from None


def output_of(command: list[str], problem: str, **settings: Any) -> str:
    """Run a command from the repository's root and return its stripped output.

    Args:
        command: the arguments.
        problem: the sentence to raise if it fails, without its full stop.
        settings: further arguments of `subprocess.run`; `stderr=None` shows its progress.

    Raises:
        ExperimentError: if it fails or cannot be started; the command's last line follows the sentence.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = {"cwd": REPO, "env": {**os.environ, "PYTHON": sys.executable}, **streams, **settings}
    try:
        done = subprocess.run(command, check=False, **given)
    except OSError as error:
        raise ExperimentError(f"{problem}.\n    {error.strerror}") from None
    if done.returncode:
        lines = (done.stdout + (done.stderr or "")).strip().splitlines() or [shlex.join(command)]
        raise ExperimentError(f"{problem}.\n    {lines[-1]}")
    return done.stdout.strip()


def ask(python: str, variable: str, code: str, *words: str) -> str:
    """Return what a line of code prints in another Python, which the environment variable names.

    Raises:
        ExperimentError: if it cannot be run.
    """
    return output_of([python, "-c", code, *words], f"{python} is no Python that runs here: set {variable} to one")


def imported(python: str, variable: str = "PYTHON") -> Target:
    """Return the verl that a Python imports, which the environment variable names.

    Raises:
        ExperimentError: if it imports none.
    """
    # A mere folder called verl, such as a clone inside this repository, has no origin.
    code = "import importlib.util as u; s = u.find_spec('verl'); print(s and s.origin or '')"
    origin = ask(python, variable, code)
    if not origin and variable != "PYTHON":
        raise ExperimentError(f"no verl found: {python} imports none; set {variable} to a Python that has it.")
    if not origin:
        raise ExperimentError(
            f"no verl found: neither VERL_REPO nor the current folder is one, and {python} imports "
            "none; set VERL_REPO to a checkout that apply_patch.py has patched."
        )
    return Target(Path(origin).parent.parent, f"what {python} imports")


def check_folder(cwd: Path, target: Target) -> None:
    """Refuse a current folder whose packages Ray's workers would import instead of the right ones.

    Ray puts the folder it is started from in front of its workers' import path.

    Raises:
        ExperimentError: if the folder holds another `verl` or another `lab` package.
    """
    for package, home in (("verl", target.path), ("lab", REPO)):
        if (cwd / package / "__init__.py").is_file() and cwd.resolve() != home.resolve():
            raise ExperimentError(
                f"the current folder {cwd} has a package {package}/ of its own, which Ray's "
                f"workers would import instead of the one in {home}: run this from another folder."
            )


def check_patched(target: Target) -> None:
    """Refuse a verl without the patch.

    Raises:
        ExperimentError: if `apply_patch.py --check` does not say APPLIED, with the command that helps.
    """
    is_installed = os.path.samefile(target.path, sysconfig.get_path("purelib"))
    place = ["--installed"] if is_installed else ["--repo", str(target.path)]
    command = [sys.executable, str(REPO / "apply_patch.py"), *place]
    done = subprocess.run([*command, "--check", "--json"], capture_output=True, text=True, check=False)
    try:
        status = json.loads(done.stdout)
    except ValueError:
        last = ((done.stdout + done.stderr).strip().splitlines() or ["no output"])[-1]
        advice = shlex.join([*command, "--check"])
        raise ExperimentError(f"cannot check whether {target.path} is patched ({last}): try\n    {advice}") from None
    refused = status.get("error")
    if refused:
        why = f"{target.path} cannot be run on ({refused['what']})"
        raise ExperimentError(f"{why}. {refused['cause']} Next:\n    {refused['next']}")
    if status["state"] != "APPLIED":
        raise ExperimentError(
            f"{target.path} is not patched ({status['state']}): patch it with\n    {shlex.join(command)}"
        )
