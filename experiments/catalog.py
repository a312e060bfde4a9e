# SPDX-License-Identifier: Apache-2.0
"""The experiments there are, and what each needs, read from the comments that head its config.

    # NAME: what it is
    # reads VARIABLE: what the file or folder is
    # writes VARIABLE: what the folder is for
    # imports MODULE MODULE ...

An experiment that lists another one among its `defaults` needs what that one needs, too.

Standard library only: it works before anything is installed.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from experiments.errors import ExperimentError, UsageError

CONFIGS = Path(__file__).resolve().parent
PUBLISHED = "gradloc-qwen3-4b"
DEMO = "demo"


@dataclass(frozen=True)
class Variable:
    """An environment variable that an experiment cannot do without."""

    name: str
    kind: str
    """`reads`: what it names must exist. `writes`: it will be made."""
    meaning: str


@dataclass(frozen=True)
class Experiment:
    """One config and what its head says."""

    name: str
    summary: str
    variables: tuple[Variable, ...]
    imports: tuple[str, ...]
    is_on_cpu: bool
    """Whether it is the demo or builds on it: it then runs in the demo's environment."""

    def problem(self, environ) -> str | None:
        """The first thing wrong with its variables, as a sentence, or None."""
        for variable in self.variables:
            value = environ.get(variable.name, "")
            if not value:
                return (
                    f"{variable.name} is not set: {self.name} needs it to name {variable.meaning}."
                )
            # A name without a leading / . or ~ may be one that transformers looks up by itself.
            path = os.path.expanduser(value)
            if variable.kind == "reads" and path[0] in "/." and not os.path.exists(path):
                return f"{variable.name}={value} does not exist: it has to name {variable.meaning}."
        return None


def names() -> list[str]:
    """Every experiment's name, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def load(name: str) -> Experiment:
    """Reads one experiment's head.

    Raises:
        UsageError: if there is none of that name.
    """
    path = CONFIGS / f"{name}.yaml"
    if name not in names():
        raise UsageError(f"no experiment is called {name!r}: there are {', '.join(names())}.")
    text = path.read_text(encoding="utf-8")
    summary = re.search(rf"^# {re.escape(name)}: (.+)$", text, re.M)
    if not summary:
        raise ExperimentError(f"{path} has no line '# {name}: what it is': add it.")
    bases = [load(base) for base in re.findall(r"^  - ([\w-]+)$", text, re.M) if base in names()]
    variables = [v for base in bases for v in base.variables]
    for kind, variable, meaning in re.findall(r"^# (reads|writes) ([A-Z_]+): (.+)$", text, re.M):
        variables.append(Variable(variable, kind, meaning))
    imports = [module for base in bases for module in base.imports]
    for line in re.findall(r"^# imports (.+)$", text, re.M):
        imports += line.split()
    return Experiment(
        name=name,
        summary=summary[1],
        variables=tuple(variables),
        imports=tuple(imports),
        is_on_cpu=name == DEMO or any(base.is_on_cpu for base in bases),
    )


def describe() -> str:
    """What `--list` prints."""
    lines = []
    for experiment in map(load, names()):
        lines.append(f"{experiment.name}: {experiment.summary}")
        for variable in experiment.variables:
            lines.append(f"    {variable.kind} {variable.name}: {variable.meaning}")
    return "\n".join(lines)
