# SPDX-License-Identifier: Apache-2.0
"""The experiments there are, and what each needs, read from the comments that head its config.

    # NAME: what it is
    # reads VARIABLE: what the file or folder is
    # writes VARIABLE: what the folder is for
    # number VARIABLE: what it sets
    # imports MODULE MODULE ...
    # material MODULE
    # arm NAME: what is different in it
    #     key=value key=value
    # seeds 1 2 3
    # summary MODULE

An experiment that lists another one among its `defaults` needs what that one needs, too. Arms,
seeds and summary are its own; `experiments.suite` runs an experiment that has arms.

Standard library only: it works before anything is installed.
"""

import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.errors import ExperimentError, UsageError

CONFIGS = Path(__file__).resolve().parent
PUBLISHED = "gradloc-qwen3-4b"
DEMO = "demo"


@dataclass(frozen=True)
class Variable:
    """An environment variable that an experiment takes a value from."""

    name: str
    kind: str
    """`reads`: what it names must exist. `writes`: it will be made. `number`: it may be unset."""
    meaning: str


@dataclass(frozen=True)
class Arm:
    """One of the runs that an experiment compares: the same config, with some values replaced."""

    name: str
    meaning: str
    overrides: tuple[str, ...]
    """Hydra overrides, in order; none for the config as it is."""


@dataclass(frozen=True)
class Experiment:
    """One config and what its head says."""

    name: str
    summary: str
    variables: tuple[Variable, ...]
    imports: tuple[str, ...]
    is_on_cpu: bool
    """Whether it is the demo or builds on it: it then runs in the demo's environment."""
    material: str = "experiments.cpu.build"
    """The module that builds model and data of an experiment on the CPU."""
    arms: tuple[Arm, ...] = ()
    """None for an experiment that is one run."""
    seeds: tuple[int, ...] = ()
    """The values of `seed` that every arm runs with; none for the config's own."""
    summary_module: str | None = None
    """What is run once the arms are through: `python -m MODULE SUITE_DIR`."""

    def problem(self, environ) -> str | None:
        """The first thing wrong with its variables, as a sentence, or None."""
        for variable in self.variables:
            value = environ.get(variable.name, "")
            if variable.kind == "number":
                if variable.name in environ and not is_amount(value):
                    return (
                        f"{variable.name}={value} is no number from 0 on: it sets "
                        f"{variable.meaning}; unset it for the experiment's own."
                    )
                continue
            if not value:
                return f"{variable.name} is not set: {self.name} needs it to name {variable.meaning}."
            # A name without a leading / . or ~ may be one that transformers looks up by itself.
            path = os.path.expanduser(value)
            if variable.kind == "reads" and path[0] in "/." and not os.path.exists(path):
                return f"{variable.name}={value} does not exist: it has to name {variable.meaning}."
        return None


def is_amount(text: str) -> bool:
    """Whether a text is a finite number from 0 on."""
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


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
    # An experiment's own line for a variable stands in for its base's.
    variables = {v.name: v for base in bases for v in base.variables}
    line = re.compile(r"^# (reads|writes|number) ([A-Z_]+): (.+)$", re.M)
    for kind, variable, meaning in line.findall(text):
        variables[variable] = Variable(variable, kind, meaning)
    imports = [module for base in bases for module in base.imports]
    for line in re.findall(r"^# imports (.+)$", text, re.M):
        imports += line.split()
    material = re.search(r"^# material ([\w.]+)$", text, re.M)
    seeds = re.search(r"^# seeds ([\d ]+)$", text, re.M)
    summary_module = re.search(r"^# summary ([\w.]+)$", text, re.M)
    return Experiment(
        name=name,
        summary=summary[1],
        variables=tuple(variables.values()),
        imports=tuple(imports),
        is_on_cpu=name == DEMO or any(base.is_on_cpu for base in bases),
        material=material[1] if material else bases[0].material if bases else Experiment.material,
        arms=read_arms(text, path),
        seeds=tuple(map(int, seeds[1].split())) if seeds else (),
        summary_module=summary_module[1] if summary_module else None,
    )


def read_arms(text: str, path: Path) -> tuple[Arm, ...]:
    """The arms in the head of a config.

    Raises:
        ExperimentError: if two have one name, or one has something that is no override.
    """
    arms = []
    head = re.compile(r"^# arm ([\w.-]+): (.+)\n((?:#     .+\n)*)", re.M)
    for name, meaning, lines in head.findall(text):
        overrides = shlex.split(lines.replace("#     ", ""))
        wrong = [word for word in overrides if "=" not in word and not word.startswith("~")]
        if wrong:
            raise ExperimentError(f"{path}: arm {name} has {wrong[0]!r}, which is no override: write key=value.")
        if name in (arm.name for arm in arms):
            raise ExperimentError(f"{path}: two arms are called {name}: rename one.")
        arms.append(Arm(name, meaning, tuple(overrides)))
    return tuple(arms)


def describe() -> str:
    """What `--list` prints."""
    lines = []
    for experiment in map(load, names()):
        lines.append(f"{experiment.name}: {experiment.summary}")
        for variable in experiment.variables:
            lines.append(f"    {variable.kind} {variable.name}: {variable.meaning}")
        for arm in experiment.arms:
            lines.append(f"    arm {arm.name}: {arm.meaning}")
        if experiment.seeds:
            lines.append(f"    seeds {' '.join(map(str, experiment.seeds))}")
    return "\n".join(lines)
