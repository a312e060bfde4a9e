# SPDX-License-Identifier: Apache-2.0
"""Choose the verl that an experiment runs on, and check that it is patched."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from lab.experiments.errors import ExperimentError

REPO = Path(__file__).resolve().parents[2]


class Target(NamedTuple):
    """A folder that contains `verl/`, and how it was chosen."""

    path: Path
    origin: str


def named(environ, cwd: Path) -> Target | None:
    """Return the verl that the user points at, or None.

    Raises:
        ExperimentError: if `VERL_REPO` is set and is not verl.
    """
    for path, origin in ((folder_in(environ, "VERL_REPO"), "VERL_REPO"), (cwd, "the current folder")):
        if path and (path / "verl" / "trainer" / "main_ppo.py").is_file():
            return Target(path.resolve(), origin)
        if path and origin == "VERL_REPO":
            raise ExperimentError(
                f"VERL_REPO={path} is not verl (no verl/trainer/main_ppo.py in it): "
                "set it to the folder that contains verl/, or unset it."
            )
    return None


def folder_in(environ, variable: str) -> Path | None:
    """Return the folder that an environment variable names; None if it is unset.

    Raises:
        ExperimentError: if it begins with ~NAME and there is no such user.
    """
    try:
        return Path(environ[variable]).expanduser() if environ.get(variable) else None
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


def locate(python: str, variable: str, *modules: str) -> dict[str, str]:
    """Return the file of each of these modules that a Python can import; a mere folder has none.

    Raises:
        ExperimentError: if it cannot be run; `variable` is the one that names it.
    """
    code = "import json, sys; from importlib.util import find_spec as find; "
    code += "print(json.dumps({m: s.origin for m in sys.argv[1:] if (s := find(m)) and s.origin}))"
    problem = f"{python} is no Python that runs here: set {variable} to one"
    return json.loads(output_of([python, "-c", code, *modules], problem))


def imported(python: str, variable: str = "PYTHON") -> Target:
    """Return the verl that a Python imports, which the environment variable names.

    Raises:
        ExperimentError: if it imports none.
    """
    origin = locate(python, variable, "verl").get("verl")
    if origin:
        return Target(Path(origin).parent.parent, f"what {python} imports")
    if variable != "PYTHON":
        raise ExperimentError(f"no verl found: {python} imports none; set {variable} to a Python that has it.")
    raise ExperimentError(
        f"no verl found: neither VERL_REPO nor the current folder is one, and {python} imports "
        "none; set VERL_REPO to a checkout that apply_patch.py has patched."
    )


def check_folder(cwd: Path, verl: Path) -> None:
    """Refuse a current folder whose packages Ray's workers would import instead of the right ones.

    Ray puts the folder it is started from in front of its workers' import path.

    Raises:
        ExperimentError: if the folder holds another `verl` or another `lab` package.
    """
    for package, home in (("verl", verl), ("lab", REPO)):
        if (cwd / package / "__init__.py").is_file() and cwd.resolve() != home.resolve():
            raise ExperimentError(
                f"the current folder {cwd} has a package {package}/ of its own, which Ray's "
                f"workers would import instead of the one in {home}: run this from another folder."
            )


def check_patched(verl: Path) -> None:
    """Refuse a verl without the patch.

    Raises:
        ExperimentError: if `apply_patch.py --check` does not say APPLIED, with the command that helps.
    """
    is_installed = os.path.samefile(verl, sysconfig.get_path("purelib"))
    place = ["--installed"] if is_installed else ["--repo", str(verl)]
    command = [sys.executable, str(REPO / "apply_patch.py"), *place]
    done = subprocess.run([*command, "--check", "--json"], capture_output=True, text=True, check=False)
    try:
        status = json.loads(done.stdout)
    except ValueError:
        last = ((done.stdout + done.stderr).strip().splitlines() or ["no output"])[-1]
        advice = shlex.join([*command, "--check"])
        raise ExperimentError(f"cannot check whether {verl} is patched ({last}): try\n    {advice}") from None
    refused = status.get("error")
    if refused:
        why = f"{verl} cannot be run on ({refused['what']})"
        raise ExperimentError(f"{why}. {refused['cause']} Next:\n    {refused['next']}")
    if status["state"] != "APPLIED":
        raise ExperimentError(f"{verl} is not patched ({status['state']}): patch it with\n    {shlex.join(command)}")
