# SPDX-License-Identifier: Apache-2.0
"""What an experiment is, beyond its Hydra config: the environment variables, packages and arms it has."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from experiments.cpu.environment import DEMO, VERL09, Environment
from experiments.settings import Settings


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
    overrides: tuple[str, ...] = ()
    """Hydra overrides, in order; none for the config as it is."""


@dataclass(frozen=True)
class Experiment:
    """One config and what is needed to run it."""

    name: str
    summary: str = ""
    variables: tuple[Variable, ...] = ()
    imports: tuple[str, ...] = ("torch", "ray", "hydra")
    """Packages that must be there."""
    is_on_cpu: bool = False
    """Whether it is the demo or builds on it: it then runs in the demo's environment."""
    is_planted: bool = False
    """Whether a run ends by comparing its event with what was planted. Not passed on to heirs."""
    material: str = "experiments.cpu.build"
    """What builds model and data of an experiment on the CPU: `python -m MODULE --cache FOLDER` prints their folder.
    "" for none."""
    verls: tuple[str, ...] = ("0.7.0",)
    """The versions of verl that it runs on with no GPU, the usual one first. Not passed on to heirs."""
    is_installed: bool = False
    """Whether its verl is one beside which gradloc is installed, with nothing patched: 0.9."""
    arms: tuple[Arm, ...] = ()
    """None for an experiment that is one run."""
    seeds: tuple[int, ...] = ()
    """The values of `seed` that every arm runs with; none for the config's own."""
    summary_module: str = ""
    """What is run once the arms are through, `python -m MODULE SUITE_DIR`; "" for nothing."""
    nodes: int = 1
    """How many Ray nodes a run on the CPU gets, all on this machine; the trainer starts a single one by itself."""
    config: str = ""
    """The config that it runs with, without `.yaml`, if that is not `experiments/NAME.yaml`. Not passed on to heirs."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides of that config. Not passed on to heirs."""
    script: str = ""
    """The module of a program of ours that trains in the place of verl's trainer: takes key=value, has no config."""
    settings: type[Settings] = Settings
    """What the script takes."""
    own: Environment = DEMO
    """Where a script runs, or an installed verl."""
    started_by: tuple[str, ...] = ()
    """What stands between Python and `-m` the script."""

    def heir(self, name: str) -> "Experiment":
        """One whose config builds on this one's, and so needs what this one needs.

        Its arms and their summary are its own, and so is what is not passed on to heirs.
        """
        fresh = {"verls": ("0.7.0",), "is_planted": False, "arms": (), "seeds": (), "summary_module": ""}
        return replace(self, name=name, config="", overrides=(), **fresh)

    def on_verl09(self, name: str, without: str) -> "Experiment":
        """Its form for verl 0.9.1, with nothing patched and without a variable."""
        variables = tuple(variable for variable in self.variables if variable.name != without)
        return replace(self, name=name, variables=variables, verls=("0.9.1",), is_installed=True, own=VERL09)

    def arguments(self, overrides: Iterable[str] = ()) -> tuple[str, list[str]]:
        """The config's name, and the overrides that Hydra gets with it: its own, then the given ones."""
        renamed = [f"trainer.experiment_name={self.name}"] if self.config else []
        return self.config or self.name, [*self.overrides, *renamed, *overrides]

    def problem(self, environ: Mapping[str, str]) -> str | None:
        """The first thing wrong with its variables, as a sentence, or None."""
        for variable in self.variables:
            value = environ.get(variable.name, "")
            if variable.kind == "number":
                if variable.name in environ and not is_amount(value):
                    return (
                        f"{variable.name}={value} is not a number of at least 0: it sets "
                        f"{variable.meaning}; unset it to use the experiment's own."
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
