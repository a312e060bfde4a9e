# SPDX-License-Identifier: Apache-2.0
"""Read the experiments from the sections of `catalog.ini`, which explains their format.

Standard library only: `run_experiment.sh` reads it before anything is installed.
"""

import math
import os
from collections.abc import Iterable, Mapping
from configparser import ConfigParser, ExtendedInterpolation
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from lab.experiments import environment, settings
from lab.experiments.environment import Environment
from lab.experiments.errors import UsageError
from lab.experiments.settings import Settings

CONFIGS = Path(__file__).resolve().parent
ACTION, ACTIONS = "actor_rollout_ref.actor.gradloc.action.mode", ("mask", "skip", "heal")
"""A setting, and its values that an exploding arm is also run with."""
NOT_INHERITED = ("is_planted", "seeds", "summary_module", "config", "overrides", "arm", "exploding", "twin")
"""Keys of a section that those which build on it do not have."""


@dataclass(frozen=True)
class Variable:
    """An environment variable that an experiment reads."""

    name: str
    kind: str
    """`reads`: its path must exist. `writes`: its path will be made. `number`: it may be unset."""
    meaning: str


@dataclass(frozen=True)
class Arm:
    """One of the runs that an experiment compares: its config with some values replaced."""

    name: str
    meaning: str
    overrides: tuple[str, ...] = ()
    """Hydra overrides, in order."""


@dataclass(frozen=True)
class Experiment:
    """A config and its requirements."""

    name: str
    summary: str = ""
    variables: tuple[Variable, ...] = ()
    imports: tuple[str, ...] = ("torch", "ray", "hydra")
    """Packages that must be installed."""
    own: Environment | None = None
    """The environment that is made for a run on the CPU; None for an experiment on GPUs, in the user's own."""
    material: str = "lab.experiments.cpu.build"
    """The builder of model and data: `python -m MODULE --cache FOLDER` prints their folder. "" for none."""
    verl: str = environment.DEFAULT_VERL
    """The version of verl that it runs on: 0.7.0, which is patched, or 0.9.1, which is installed with gradloc."""
    nodes: int = 1
    """Number of Ray nodes of a run on the CPU, all on this machine."""
    script: str = ""
    """A module of ours that trains in place of verl's trainer: it takes key=value and has no config."""
    settings: type[Settings] = Settings
    """The script's settings."""
    started_by: tuple[str, ...] = ()
    """Arguments between Python and `-m` the script, such as torchrun's."""

    is_planted: bool = False
    """Whether a run ends by comparing its event with the planted token."""
    arms: tuple[Arm, ...] = ()
    """Empty for an experiment that is one run."""
    seeds: tuple[int, ...] = ()
    """The seeds that every arm runs with; empty for the config's own."""
    summary_module: str = ""
    """Run after all arms as `python -m MODULE SUITE_DIR`; "" for none."""
    config: str = ""
    """The config's name without `.yaml`; "" for the experiment's."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides of that config."""

    @property
    def is_installed(self) -> bool:
        """Whether its verl is installed together with gradloc and not patched."""
        return not self.script and self.verl != environment.DEFAULT_VERL

    @property
    def python_variable(self) -> str:
        """The environment variable that names the interpreter to use."""
        own = self.own or (environment.VERL09 if self.is_installed else environment.DEMO)
        return own.variable or "PYTHON"

    def arguments(self, overrides: Iterable[str] = ()) -> tuple[str, list[str]]:
        """Return the config's name and its overrides: the experiment's, then the given ones."""
        renamed = [f"trainer.experiment_name={self.name}"] if self.config else []
        return self.config or self.name, [*self.overrides, *renamed, *overrides]

    def problem(self, environ: Mapping[str, str]) -> str | None:
        """Return a sentence on the first variable with a wrong value, or None."""
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
    """Return whether a text is a finite number of at least 0."""
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


# ---- from the sections


def read(text: str) -> dict[str, Experiment]:
    """Return the experiments of a catalog, by name.

    Raises:
        AttributeError: for a key that is no field of `Experiment`.
        KeyError: if an experiment refers to another that is not above it.
    """
    parser = ConfigParser(delimiters=("=",), interpolation=ExtendedInterpolation())
    parser.optionxform = str  # variables are in capitals
    parser.read_string(text)
    sections: dict[str, dict[str, str]] = {}
    for name in parser.sections():
        given = {key: value for key, value in parser[name].items() if key not in parser.defaults()}
        base: dict[str, str] = {}
        if "builds_on" in given:
            above = sections[given.pop("builds_on")]
            base = {key: value for key, value in above.items() if key.partition(" ")[0] not in NOT_INHERITED}
        elif "form_of" in given:
            base = sections[given.pop("form_of")] | {"verl": "0.9.1"}
            base.pop("number RUNAWAY_PENALTY_MULTIPLIER", None)  # the demo's config lacks it there
            base |= {"own": "VERL09"} if "own" in base else {}
        sections[name] = base | given
    return {name: _experiment(name, section) for name, section in sections.items()}


def _experiment(name: str, section: dict[str, str]) -> Experiment:
    """Make an experiment from its section and what that inherits."""
    variables, arms, fields = [], [], {}
    for key, value in section.items():
        kind, _, which = key.partition(" ")
        first, *lines = value.splitlines() or [""]
        if not which:
            fields[key] = _field(key, value)
        elif kind == "arm":
            arms.append(Arm(which, first, tuple(lines)))
        elif kind == "exploding":
            healthy = section[f"twin {which}"].splitlines()
            loud = (*healthy, *lines)
            acting = [Arm(f"{which}-{m}", f"the same, action.mode={m}", (*loud, f"{ACTION}={m}")) for m in ACTIONS]
            arms += [Arm(which, first, loud), *acting, Arm(f"{which}-twin", "its healthy twin", tuple(healthy))]
        elif kind != "twin":
            variables.append(Variable(which, kind, first))
    return Experiment(name, variables=tuple(variables), arms=tuple(arms), **fields)


def _field(name: str, text: str) -> Any:
    """Convert a text to the type of a field of `Experiment`."""
    if name in ("own", "settings"):
        return getattr(environment if name == "own" else settings, text)
    default = getattr(Experiment, name)
    if isinstance(default, tuple):
        return tuple(map(int, text.split())) if name == "seeds" else tuple(text.split())
    return text == "yes" if isinstance(default, bool) else type(default)(text)


_ALL = read((CONFIGS / "catalog.ini").read_text(encoding="utf-8"))
ON_VERL09 = {name.removesuffix("-verl09"): entry for name, entry in _ALL.items() if name.endswith("-verl09")}
"""Experiment name -> its form for verl=0.9.1."""
TRAINERS = {"trl": _ALL["demo-trl"], "loop": _ALL["demo-loop"]}
"""Trainer -> the demo's form for it."""
EXPERIMENTS = {
    e.name: e
    for e in sorted(_ALL.values(), key=attrgetter("name"))
    if e not in (*ON_VERL09.values(), *TRAINERS.values())
}
DEMO, PUBLISHED = EXPERIMENTS["demo"], EXPERIMENTS["gradloc-qwen3-4b"]


def form_for(experiment: Experiment, version: str | None, trainer: str) -> Experiment:
    """Return the experiment's form for a version of verl or for another trainer; by default itself.

    Raises:
        UsageError: if it has none.
    """
    if trainer != "verl":
        if experiment is not DEMO or version is not None or trainer not in TRAINERS:
            listed = f"trainer={' or '.join(TRAINERS)}"
            raise UsageError(f"trainer={trainer} is for the demo alone, as {listed} and without verl=VERSION.")
        return TRAINERS[trainer]
    forms = {form.verl: form for form in (experiment, ON_VERL09.get(experiment.name)) if form}
    if version is not None and version not in forms:
        raise UsageError(f"{experiment.name} runs on verl {' and '.join(forms)}, not on {version}.")
    return experiment if version is None else forms[version]


def load(name: str) -> Experiment:
    """Return the experiment of that name.

    Raises:
        UsageError: if there is none.
    """
    base = name.removesuffix("-verl09")
    if base != name and base in ON_VERL09:
        raise UsageError(f"{name} is {base} on verl 0.9.1: write {base} verl=0.9.1.")
    if name not in EXPERIMENTS:
        has_config = (CONFIGS / f"{name}.yaml").exists()
        hint = " (its config is there; lab/experiments/catalog.ini lacks it)" if has_config else ""
        raise UsageError(f"no experiment is called {name!r}{hint}: there are {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]


def describe() -> str:
    """Return the text of `--list`."""
    lines = []
    for experiment in EXPERIMENTS.values():
        lines.append(f"{experiment.name}: {experiment.summary}")
        lines += ["    verl=0.9.1: the same on that verl"] if experiment.name in ON_VERL09 else []
        lines += [f"    {variable.kind} {variable.name}: {variable.meaning}" for variable in experiment.variables]
        lines += [f"    arm {arm.name}: {arm.meaning}" for arm in experiment.arms]
    return "\n".join(lines)
