# SPDX-License-Identifier: Apache-2.0
"""The experiments there are: the sections of `catalog.ini`, which says how one is written.

Standard library only: `run_experiment.sh` reads it before anything is installed.
"""

from configparser import ConfigParser, ExtendedInterpolation
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import settings
from experiments.cpu import environment
from experiments.errors import UsageError
from experiments.experiment import Arm, Experiment, Variable

CONFIGS = Path(__file__).resolve().parent
NOT_ON_VERL09 = "RUNAWAY_PENALTY_MULTIPLIER"
"""The variable of the demo that its config for verl 0.9 does not take."""
ACTIONS = ("mask", "skip", "heal")
"""What an arm that explodes is also run with."""


def read(text: str) -> dict[str, Experiment]:
    """The experiments of a catalog, by name.

    Raises:
        AttributeError: for a key that is no field of `Experiment`.
        KeyError: for one that is made of another that does not stand above it.
    """
    parser = ConfigParser(delimiters=("=",), interpolation=ExtendedInterpolation())
    parser.optionxform = str  # variables are in capitals
    parser.read_string(text)
    found: dict[str, Experiment] = {}
    for name in parser.sections():
        own = {key: value for key, value in parser[name].items() if key not in parser.defaults()}
        found[name] = _experiment(name, own, found)
    return found


def _experiment(name: str, own: dict[str, str], above: dict[str, Experiment]) -> Experiment:
    """An experiment from what its section says, and from the one above that it is made of."""
    base = Experiment(name)
    if "builds_on" in own:
        base = above[own.pop("builds_on")].heir(name)
    if "form_of" in own:
        base = above[own.pop("form_of")].on_verl09(name, without=NOT_ON_VERL09)
    variables = {variable.name: variable for variable in base.variables}
    arms = {arm.name: arm for arm in base.arms}
    fields: dict[str, Any] = {}
    for key, value in own.items():
        kind, _, which = key.partition(" ")
        first, *lines = value.splitlines() or [""]
        if not which:
            fields[key] = _field(key, value)
        elif kind == "arm":
            arms[which] = Arm(which, first, tuple(lines))
        elif kind == "exploding":
            arms |= _with_twin(which, first, own[f"twin {which}"].splitlines(), lines)
        elif kind != "twin":
            variables[which] = Variable(which, kind, first)
    return replace(base, variables=tuple(variables.values()), arms=tuple(arms.values()), **fields)


def _field(name: str, text: str) -> Any:
    """A field of `Experiment` from its text, by what its default is."""
    default = getattr(Experiment, name)
    if name == "settings":
        return getattr(settings, text)
    if name == "own":
        return getattr(environment, text)
    if name == "seeds":
        return tuple(map(int, text.split()))
    if isinstance(default, tuple):
        return tuple(text.split())
    return text == "yes" if isinstance(default, bool) else type(default)(text)


def _with_twin(name: str, meaning: str, healthy: list[str], more: list[str]) -> dict[str, Arm]:
    """An arm that explodes, the same with spikes masked, skipped or healed, and its healthy twin."""
    exploding, key = (*healthy, *more), "actor_rollout_ref.actor.gradloc.action.mode"
    acting = [Arm(f"{name}-{m}", f"the same, action.mode={m}", (*exploding, f"{key}={m}")) for m in ACTIONS]
    arms = [Arm(name, meaning, exploding), *acting, Arm(f"{name}-twin", "its healthy twin", tuple(healthy))]
    return {arm.name: arm for arm in arms}


_ALL = read((CONFIGS / "catalog.ini").read_text(encoding="utf-8"))
ON_VERL09 = {name.removesuffix("-verl09"): entry for name, entry in _ALL.items() if name.endswith("-verl09")}
"""By the experiment's name: its form for verl=0.9.1."""
TRAINERS = {"trl": _ALL["demo-trl"], "loop": _ALL["demo-loop"]}
"""The demo's forms for other trainers than verl."""
EXPERIMENTS = {e.name: e for e in _ALL.values() if e not in (*ON_VERL09.values(), *TRAINERS.values())}
DEMO, PUBLISHED = EXPERIMENTS["demo"], EXPERIMENTS["gradloc-qwen3-4b"]


def names() -> list[str]:
    """Every experiment's name, sorted."""
    return sorted(EXPERIMENTS)


def forms_of(experiment: Experiment) -> list[Experiment]:
    """The experiment, and its form for verl 0.9.1 if it has one."""
    return [experiment, *(form for name, form in ON_VERL09.items() if name == experiment.name)]


def form_for(experiment: Experiment, version: str | None, trainer: str) -> Experiment:
    """The experiment's form for that version of verl, or for another trainer; itself where none was asked for.

    Raises:
        UsageError: if it has none.
    """
    if trainer != "verl":
        if experiment is not DEMO or version is not None or trainer not in TRAINERS:
            listed = f"trainer={' or '.join(TRAINERS)}"
            raise UsageError(f"trainer={trainer} is for the demo alone, as {listed} and without verl=VERSION.")
        return TRAINERS[trainer]
    forms = forms_of(experiment)
    for form in forms:
        if version is None or version in form.verls:
            return form
    *known, last = (verl for form in forms for verl in form.verls)
    listed = f"{', '.join(known)} and {last}" if known else last
    raise UsageError(f"{experiment.name} runs on verl {listed}, not on {version}.")


def load(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UsageError: if there is none.
    """
    base = name.removesuffix("-verl09")
    if base != name and base in ON_VERL09:
        raise UsageError(f"{name} is {base} on verl 0.9.1: write {base} verl=0.9.1.")
    if name not in EXPERIMENTS:
        hint = " (its config is there; experiments/catalog.ini lacks it)" if (CONFIGS / f"{name}.yaml").exists() else ""
        raise UsageError(f"no experiment is called {name!r}{hint}: there are {', '.join(names())}.")
    return EXPERIMENTS[name]


def describe() -> str:
    """What `--list` prints."""
    lines = []
    for experiment in map(load, names()):
        lines.append(f"{experiment.name}: {experiment.summary}")
        _, *others = (verl for form in forms_of(experiment) for verl in form.verls)
        lines += [f"    verl={verl}: the same on that verl" for verl in others]
        lines += [f"    {variable.kind} {variable.name}: {variable.meaning}" for variable in experiment.variables]
        lines += [f"    arm {arm.name}: {arm.meaning}" for arm in experiment.arms]
    return "\n".join(lines)
