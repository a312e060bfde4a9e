# SPDX-License-Identifier: Apache-2.0
"""``gradloc check RUN_CONFIG``: the features of a run, its refusal, and the cost of a search.

Imports neither torch nor a trainer: the refusals are those of the trainer's start, the forecast is the search's own.
"""

import argparse
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...core.memory_plans import PLANS
from ...explain.text import one_line, plural
from ...forecast import MODELS, Forecast, Model, Plan, forecast, model_of
from ...record.files import SETTINGS, is_larger, read_bytes, read_json
from ...search.limit import Limit
from .. import output
from ..errors import ReportError
from ..pages import terminal
from ..shell import is_script, overrides_in

CARD_GIB = 79.6
PRESETS = Path(__file__).parents[2] / "conf" / "gradloc"
EPILOG = """\
examples:
  gradloc check run.yaml                              a config that a run has written, or one with defaults
  gradloc check run.sh                                a script with verl's overrides; verl need not be there
  gradloc check mine.yaml +gradloc=on trainer.nnodes=8  with overrides, as main_ppo takes them
  gradloc check +gradloc=on actor_rollout_ref.actor.use_dynamic_bsz=true  verl's own config with these
  gradloc check grpo.yaml --gpus 8 --model 7B         TRL's arguments, YAML or JSON
"""
_PLACEMENTS = (
    "everything stays on the device",
    "the optimizer's state moves to the host",
    "the optimizer's state, saved weights and gradients move to the host",
    "as search 3, by bisection alone",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    said = "YAML, JSON or a shell script of overrides; or the first override of verl's own config"
    parser.add_argument("config", metavar="RUN_CONFIG", help=said)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="OVERRIDE", help="KEY=VALUE, as the trainer takes it"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help=f"a model's folder or config.json, or a size: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of the run, for TRL, whose arguments do not say (default: 1)"
    )
    parser.add_argument(
        "--card", type=float, default=CARD_GIB, metavar="GIB", help="memory of a device (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="how long one of the run's updates takes; else it is estimated"
    )
    parser.add_argument("--json", action="store_true", help="print the same table as JSON")


class Checked(NamedTuple):
    """A run's config and what it asks for."""

    trainer: str
    settings: Any = None
    """``GradLocConfig``; None where it is off."""
    features: Sequence[str] = ()
    """Features that are on, by the setting that switches each on."""
    refusal: str = ""
    """Sentence of the refusal at start; empty where there is none."""
    plan: Plan | str | None = None
    """The layout and the load, or why they are not known; None where it is refused."""
    unchecked: str = ""
    """Why a refusal could not be checked; empty where it could."""
    unknown: str = ""
    """Settings that are probably misspelt."""


def run(args: argparse.Namespace) -> int:
    for option in ("card", "gpus", "seconds"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise ReportError(f"--{option} must be a positive number, found {value:g}.")
    if args.model is not None:
        try:
            _model(args.model)
        except ValueError as error:
            raise ReportError(f"{str(error).rstrip('.')}.") from None
    try:
        checked = _read(args.config, args.overrides, args.gpus)
    except SystemExit as error:  # of a preset that is none
        checked = Checked("verl", refusal=str(error))
    except ModuleNotFoundError as error:
        raise ReportError(f"check needs {error.name}: run it where the trainer is installed.") from None
    except (ValueError, *_WRONG_KINDS) as error:
        raise ReportError(
            f"the config has a setting that is missing, 0 or no number ({_said(error).rstrip('.')})."
        ) from None
    if args.gpus is not None and checked.trainer != "TRL":
        raise ReportError("--gpus is for TRL's arguments: verl's are trainer.nnodes and trainer.n_gpus_per_node.")
    rows = [("not checked", checked.unchecked) if checked.unchecked else ("refused", checked.refusal or "nothing")]
    rows += [("unknown", checked.unknown)] * bool(checked.unknown)
    if not checked.refusal:
        by = "gradloc: observe" if checked.trainer == "TRL" else "+gradloc=observe"
        rows.append(("on", ", ".join(checked.features) or f"nothing: {by} turns GradLoc on"))
        if checked.settings is not None and checked.settings.enable and checked.plan is not None:
            rows += _costs(args, checked.plan, checked.settings) + _written(checked.settings)
    if args.json:
        output.deliver(None, output.as_json({"config": args.config, "trainer": checked.trainer, **dict(rows)}))
        return 1 if checked.refusal else 0
    out = terminal.console()
    out.print(one_line(f"{args.config}: {checked.trainer}"), style="bold")
    out.print(terminal.table((), ((name, one_line(text, 2000)) for name, text in rows)))
    return 1 if checked.refusal else 0


# ---- what the config says

_WRONG_KINDS = (TypeError, AttributeError, ZeroDivisionError)
"""Errors of computing with a wrong setting."""


def _read(first: str, overrides: Sequence[str], gpus: int | None) -> Checked:
    path = Path(first)
    if not path.is_file():
        if "=" in first:
            return _read_verl(None, [first, *overrides])
        what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise ReportError(
            f"{first} {what}: name the run's config, the script that starts it, or overrides such as trainer.nnodes=8."
        )
    import yaml

    text = _text_of(path)
    if is_script(path, text):
        found = overrides_in(text)
        if not found:
            raise ReportError(
                f"{first} has no override of verl's (such as trainer.nnodes=8): name the script that starts the "
                "trainer, or a config that the run has written."
            )
        last = {each.partition("=")[0].lstrip("+~"): each for each in [*found, *overrides]}
        try:
            return _read_verl(None, [*last.values()])
        except yaml.YAMLError as error:
            raise ReportError(f"{first} has a value that is no YAML: {one_line(str(error), 200)}") from None
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
        content = None
    if not isinstance(content, dict) or is_larger(content, SETTINGS // 4):
        raise ReportError(
            f"{first} is no configuration in YAML or JSON: name a run.sh or config.yaml. For a log: gradloc {first}"
        )
    if "actor_rollout_ref" not in content and "defaults" not in content:
        return _read_trl(first, content, overrides, gpus or 1)
    return _read_verl(path, overrides)


def _text_of(path: Path) -> str:
    """Read a config or a script; raise ReportError where it is longer than any is."""
    try:
        return read_bytes(path, most=SETTINGS).decode("utf-8", errors="replace")
    except ValueError as error:
        raise ReportError(f"{path} is no run's config: {error}.") from None


def _read_verl(path: Path | None, overrides: Sequence[str]) -> Checked:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    from ...adapters.verl_common.plan import is_engine, plan_of
    from ...adapters.verl_common.requirements import asked_of, health_in, tables_for
    from ...names import refuse_unknown_overrides

    spec = find_spec("verl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    verl_configs = Path(places[0], "trainer", "config") if places else None
    if path is None and verl_configs is None:
        return _read_alone(overrides)
    folder, name = (verl_configs, "ppo_trainer") if path is None else (path.resolve().parent, path.stem)
    is_copied = path is not None and path.suffix != ".yaml"  # all that Hydra looks for; JSON is YAML, too
    found = [f"file://{place}" for place in ([folder] * is_copied + [verl_configs]) if place is not None]
    search = path is not None and found and "searchpath" not in path.read_text(encoding="utf-8")
    given = [f"hydra.searchpath=[{','.join(found)}]"] * bool(search) + list(overrides)
    try:
        refuse_unknown_overrides(overrides)
        with tempfile.TemporaryDirectory() as copied:
            if path is not None and is_copied:
                shutil.copyfile(path, Path(copied, f"{name}.yaml"))
                folder = Path(copied)
            with initialize_config_dir(str(folder), version_base=None):
                config = compose(name, given)
    except (HydraException, OmegaConfBaseException) as error:
        why = str(error).partition("\n")[0]
        if verl_configs is None and isinstance(error, MissingConfigException):
            raise ReportError(
                f"{path} builds on verl's defaults, and verl is not installed here: run this where it is."
            ) from None
        if preset := re.search(r"Could not find 'gradloc/(\w+)'", why):
            raise _no_preset(preset[1]) from None
        raise ReportError(f"Hydra cannot make a config of this: {one_line(why, 300)}") from None
    if "actor_rollout_ref" not in config:
        raise ReportError(f"{path} has no actor_rollout_ref: it is no config of verl's PPO trainer.")
    trainer = "verl"
    try:
        trainer = f"verl {'0.9' if is_engine(config) else '0.7'}, {config.actor_rollout_ref.actor.strategy}"
        asked = asked_of(config, tables_for(config) if is_engine(config) else ["0.7"])
        on = [*asked.features, *["trainer.health.enable"] * (health_in(config) is not None)]
        return Checked(trainer, asked.settings, on, plan=plan_of(config))
    except OmegaConfBaseException as error:
        why = str(error).partition("\n")[0]
        raise ReportError(f"{path or 'the config'} cannot be read: {one_line(why, 300)}.") from None
    except ValueError as error:
        return Checked(trainer, refusal=_said(error))


def _no_preset(name: str) -> SystemExit:
    known = ", ".join(sorted(each.stem for each in PRESETS.glob("*.yaml")))
    return SystemExit(f"+gradloc={name} is no preset: there are {known}.")


def _said(error: Exception) -> str:
    """Return what an error says, in words of ours where it is Python's on a number."""
    _, is_number, found = str(error).partition("invalid literal for int() with base 10: ")
    return f"a size must be a whole number, found {found}." if is_number else str(error)


def _refuse_words(overrides: Iterable[str]) -> None:
    for override in overrides:
        if not override.partition("=")[1]:
            raise ReportError(f"an override must be KEY=VALUE, found {override}.")


def _read_alone(overrides: Sequence[str]) -> Checked:
    """Read overrides by themselves where verl and its defaults are not installed."""
    from omegaconf import OmegaConf

    from ...adapters.verl_common.plan import plan_of
    from ...adapters.verl_common.requirements import health_in
    from ...config import settings_in
    from ...names import refuse_unknown_overrides

    _refuse_words(each for each in overrides if not each.startswith("~"))
    refuse_unknown_overrides(overrides)
    blocks = {"actor_rollout_ref": {"actor": {}, "rollout": {}, "model": {}}, "trainer": {}, "data": {}}
    config = OmegaConf.create(blocks)
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "gradloc":
            preset = PRESETS / f"{value}.yaml"
            if not preset.is_file():
                raise _no_preset(value)
            given = OmegaConf.load(preset)
            given.pop("defaults", None)
            config = OmegaConf.merge(config, given)
    dotted = [each.lstrip("+~") for each in overrides if each.lstrip("+").partition("=")[0] != "gradloc"]
    try:
        config = OmegaConf.merge(config, OmegaConf.from_dotlist(dotted))
        settings, health = settings_in(config), health_in(config)
    except ValueError as error:
        return Checked("verl", refusal=str(error))
    switched = {"actor_rollout_ref.actor.gradloc.enable": settings.enable, "trainer.health.enable": health}
    on = [key for key, is_on in switched.items() if is_on]
    why = "what verl itself refuses, since verl is not installed here"
    try:
        plan = plan_of(config)
    except (ValueError, *_WRONG_KINDS) as error:  # batch sizes that only verl's defaults say
        plan = f"a size is missing, 0 or no number ({_said(error).rstrip('.')})"
    return Checked("a run of verl, read from its overrides alone", settings, on, plan=plan, unchecked=why)


def _read_trl(path: str, content: dict[str, Any], overrides: Sequence[str], gpus: int) -> Checked:
    import yaml

    from ...adapters.trl.config import ARGUMENTS, health_of, misspelt, plan_of, refuse, settings_of, setup_in

    if not ARGUMENTS & content.keys():
        raise ReportError(f"{path} has no setting of TRL's or verl's: name the run's config.")
    _refuse_words(overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        try:
            content[key.lstrip("-")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ReportError(f"the override {override} is no YAML behind its =: quote it.") from None
    try:
        settings = settings_of(content.get("gradloc", "observe"), str(content.get("output_dir", "trainer_output")))
        health = health_of(content.get("health", False))
        if settings is not None or health is not None:
            refuse(setup_in(content, gpus), settings)
    except (ValueError, TypeError) as error:
        return Checked("TRL", refusal=str(error))
    plan = plan_of(content, gpus, min(gpus, 8))
    on = ["gradloc"] * (settings is not None) + ["health"] * (health is not None)
    return Checked("TRL", settings, on, plan=plan, unknown="; ".join(misspelt(content)))


# ---- what a search takes


def _costs(args: argparse.Namespace, plan: Plan | str, settings: Any) -> list[tuple[str, str]]:
    tau = settings.trigger.tau
    threshold = "adaptive" if tau is None else f"{tau:g}"
    action, strategy = settings.action.mode, settings.search.strategy
    said = [("on a spike", f"action {action}; threshold {threshold}; search {strategy}")]
    if isinstance(plan, str):
        return [*said, ("memory", f"not known, nor the stall: {plan}")]
    seconds, about, card = args.seconds, "", args.card * 2**30
    try:
        model = _model(args.model or plan.model)
        trained = model.adapted(plan.adapters) if plan.adapters else 1.0
        memory = forecast(model, replace(plan.layout, trained=trained), plan.load)
        said += _memory(model, plan, memory, card)
    except ValueError as error:
        said.append(("memory", f"not known: {error}"))
    except _WRONG_KINDS as error:
        why = f"a size in the model's config.json is missing, 0 or no number ({error})"
        said.append(("memory", f"not known: {why}"))
    else:
        if memory.plan_for(card) is None:
            return said  # and there is no search to stall
        if seconds is None:
            seconds = _update_seconds(model, plan)
            speed = f"{PEAK / 1e12:.0f} TFLOP/s at {EFFICIENCY:.0%}"
            about = f" (an update is assumed to take {seconds:,.0f} s, by {speed}; --seconds sets it)"
    return [*said, ("stall", _stall(plan, settings, seconds) + about)]


PEAK, EFFICIENCY = 989e12, 0.4
"""An H100's bfloat16 operations a second, and the part of them that training usually gets."""


def _update_seconds(model: Model, plan: Plan) -> float:
    """Estimate an update's seconds from six operations per weight and token, eight where forwards are repeated."""
    tokens = plan.load.micro_batches * plan.load.tokens * plan.optimizer_steps
    each = (8 if plan.load.is_checkpointed else 6) * model.weights / (plan.layout.tensor * plan.layout.pipeline)
    return tokens * each / (PEAK * EFFICIENCY)


def _model(name: str) -> Model:
    """Return the model's sizes; raise ValueError with a sentence where they are not known."""
    given = name
    size = re.search(r"[-_](\d+(?:\.\d+)?B)\b", name, re.IGNORECASE)
    if size and not Path(name).expanduser().exists():
        name = size[1].upper()
    if name in MODELS:
        return MODELS[name]
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        found = f" (found {given})" if given else ""
        raise ValueError(f"give --model a model's folder, or one of {', '.join(MODELS)}{found}")
    try:
        return model_of(path.parent.name, read_json(path))
    except (ValueError, *_WRONG_KINDS) as error:
        raise ValueError(f"{path}: {error}") from None


def _memory(model: Model, plan: Plan, memory: Forecast, card: float) -> list[tuple[str, str]]:
    """Describe the memory that training takes, and a search under each plan."""
    chosen, layout = memory.plan_for(card), plan.layout
    fits = "" if memory.trained <= card else ": it does not fit"
    said = [
        (
            "model",
            f"{model.name}: {model.weights / 1e9:.1f}B weights on {plural(layout.gpus, 'GPU')}, one replica over "
            f"{layout.shards * layout.tensor * layout.pipeline}; "
            f"{plural(plan.load.micro_batches, 'micro-batch')} of {plan.load.tokens:,} tokens in an optimizer step",
        ),
        ("training", f"{_gib(memory.trained)} of {_gib(card)} at an update's peak{fits}"),
    ]
    for number, (option, what) in enumerate(zip(PLANS, _PLACEMENTS, strict=True), 1):
        host = f" ({_gib(memory.node(option))} a node)" if memory.node(option) else ""
        moved = f", {memory.seconds(option):.1f} s to pin and move it" if memory.seconds(option) >= 0.05 else ""
        mark = " <- the first plan that fits" if option == chosen else ""
        said.append((f"search {number}", f"{_gib(memory.device(option))} on the device: {what}{host}{moved}{mark}"))
    none = ("search", "no plan fits, so a spike is logged without a search, and the step is taken as it was")
    return said if chosen else [*said, none]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _stall(plan: Plan, settings: Any, seconds: float | None) -> str:
    """Describe the longest stall of one update by searches."""
    budget = settings.budget if settings.search.strategy == "bisect" else None
    step = None if seconds is None else seconds / plan.optimizer_steps
    limit = Limit(plan.load.micro_batches, settings.search.max_steps, step, budget)
    most = settings.action.max_searches_per_step or plan.optimizer_steps
    searches = most if settings.action.mode in ("mask", "heal") else min(settings.trigger.max_events_per_step, most)
    # the first setting is measured even when time is up
    longest = limit.seconds * (1 + (settings.search.max_cures > 0) / settings.search.max_steps)
    time = f"adds at most {longest * searches:,.0f} s" if math.isfinite(longest) else "adds no limited time"
    most = "of at most" if searches == 1 else "each of at most"
    steps, made = plural(plan.optimizer_steps, "optimizer step"), plural(searches, "search")
    return (
        f"{time} to an update of {steps}: {made}, {most} {limit.most:,.0f} forwards of a micro-batch "
        f"(search.max_steps={settings.search.max_steps:g}), in which all ranks take part"
    )


def _written(settings: Any) -> list[tuple[str, str]]:
    """List where events go: disk, console, trackers, alerts."""
    evidence, notify = settings.evidence, settings.notify
    kept = (
        f"{settings.trigger.max_events} events at most; tokens' text: {evidence.text}; inputs for an event's replay: "
    )
    kept += f"{evidence.bundle}, up to {evidence.max_gb:g} GB an event"
    weights = "" if evidence.checkpoint == "off" else ", and the weights before the step"
    receivers = ["the console and the run's trackers"]
    receivers += [name for name in ("command", "webhook") if getattr(notify, name)]
    receivers += ["trackers' alerts"] * notify.tracker_alerts
    return [("events", f"{settings.root} on the driver: {kept}{weights}"), ("alerts", ", ".join(receivers))]
