# SPDX-License-Identifier: Apache-2.0
"""The command line of run_experiment.sh: chooses, checks, says what it will run, runs it."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lab.experiments import catalog, launch, suite, target, verl09
from lab.experiments.catalog import Experiment
from lab.experiments.cpu import environment, verdict
from lab.experiments.errors import ExperimentError, UsageError

EPILOG = """\
arguments after NAME are Hydra overrides and go to verl as they are:
  ./run_experiment.sh demo seed=3

verl=VERSION says which verl it runs on, and is no override: the demo and some others on 0.7.0 in a patched
copy, or on 0.9.1, which is installed with gradloc beside it, and nothing is patched:
  ./run_experiment.sh demo verl=0.9.1

trainer=trl runs the demo on TRL's GRPOTrainer, in an environment of its own; what it takes: seed, steps, gradloc,
advantage, first_step, last_step, tau:
  ./run_experiment.sh demo trainer=trl gradloc=mask advantage=nan

an experiment with arms (--list shows them) runs every arm, one after the other, and then compares
them; a part of it, and overrides for all arms:
  ./run_experiment.sh NAME --arms one,other --seeds 1,2 key=value

trainer=loop runs it in a plain PyTorch loop, which needs torch alone; what it takes: seed, steps, gradloc, weight,
first_step, last_step:
  ./run_experiment.sh demo trainer=loop gradloc=mask

pretrain is such a loop, too; what it takes: seed, steps, documents, rows, tokens, rate,
peak, clean, every, threads

variables:
  VERL_REPO   the verl to run on; else the current folder if it is verl; else what PYTHON imports
              (the demo: a patched copy that it makes itself)
  PYTHON      the Python to run with; else python3 (the demo: an environment that it makes itself)
  VERL09_PYTHON   for verl=0.9.1, instead of both: a Python with verl 0.9.1 and gradloc installed
  TRL_PYTHON  for trainer=trl, likewise: a Python with what requirements/trl.txt names
  LOOP_PYTHON for trainer=loop, likewise: requirements/loop.txt; else PYTHON, where that has it
  RUN_DIR     where results go; else runs/NAME-<time>. An experiment with arms goes on there if it was cut off
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="./run_experiment.sh",
        description="Runs lab/experiments/NAME.yaml with verl's own trainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="the experiment; --list names them")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    made.add_argument("--list", action="store_true", help="the experiments and what each needs")
    made.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
    made.add_argument("--arms", metavar="A,B", help="only these arms of an experiment with arms")
    made.add_argument("--seeds", metavar="1,2", help="run each arm with these seeds")
    made.add_argument("--verbose", action="store_true", help="the trainer's whole output; demo: not only steps")
    return made


def main(argv=None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_intermixed_args(argv)
    try:
        if args.list:
            print(catalog.describe(), flush=True)
            return 0
        return run(args, os.environ, Path.cwd())
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ExperimentError as error:
        print(f"run_experiment.sh: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


def run(args, environ, cwd: Path) -> int:
    """Prepares one experiment and runs it, or says what it would run."""
    for name in ("PYTHON", "VERL09_PYTHON", "TRL_PYTHON", "LOOP_PYTHON"):
        if os.sep in environ.get(name, ""):  # it is run from other folders, too
            environ[name] = os.path.abspath(environ[name])
    version = take(args.overrides, "verl")
    experiment = catalog.form_for(choose(args, environ), version, take(args.overrides, "trainer") or "verl")
    problem = experiment.problem(environ)
    if problem:
        raise ExperimentError(problem)
    cells = suite.plan(experiment, args.arms, args.seeds, args.overrides)
    if experiment.script:
        python, variable, verl = find_for_script(experiment, environ, args)
    elif experiment.is_installed:
        python, variable, verl = find_installed(experiment, environ, cwd, args.dry_run)
    else:
        python, variable, verl = find_patched(experiment, version, environ, cwd, args.dry_run)
    run_dir = results_folder(environ, cwd, experiment.name, is_suite=bool(cells))
    if args.dry_run:
        runs = [(cell["overrides"], run_dir / cell["folder"]) for cell in cells]
        for overrides, folder in runs or [(args.overrides, run_dir)]:
            describe(command(python, experiment, overrides), folder)
        return 0
    lacking = lacking_in(python, variable, experiment.imports)
    if lacking:
        raise ExperimentError(
            f"{python} lacks {', '.join(lacking)}, which {experiment.name} needs: install that for it, or set "
            f"{variable} to a Python that has it."
        )
    on_cpu = experiment.is_on_cpu
    material = environment.ensure_material(python, experiment.material) if on_cpu and experiment.material else None
    before = dict(environ)
    make_folder(run_dir, exist_ok=bool(cells))
    with launch.plain_path(python) as plain:

        def run_one(overrides: list[str], folder: Path) -> int:
            folder.mkdir(exist_ok=True)
            os.environ.update(child_environment(before, experiment, verl, folder, material))
            line = command(plain, experiment, overrides)
            if experiment.nodes > 1:
                line = [plain, "-m", "lab.experiments.cpu.nodes", str(experiment.nodes), *line]
            describe(line, folder)
            code = launch.run(line, folder / "console.log", is_brief=on_cpu and not args.verbose)
            if cells and code == 0 and (folder / "gradloc" / "events.jsonl").is_file():
                draw_report(python, folder)
            return code

        if cells:
            code = suite.run(experiment, cells, run_dir, run_one, plain)
        else:
            code = run_one(args.overrides, run_dir)
    if code == 0 and "gradloc=off" not in args.overrides:
        if experiment.is_planted:
            code = verdict.main([str(run_dir)])
        elif experiment.script:
            print(f"\n{(run_dir / 'summary.md').read_text(encoding='utf-8')}")
        if experiment.is_planted or experiment.script:
            draw_report(python, run_dir)
    say("results", run_dir)
    return code


class Found(NamedTuple):
    """What an experiment runs with; a dry run makes none of it."""

    python: str
    variable: str
    """Names another one."""
    verl: Path | None = None
    """The folder with `verl/`; None for a program of ours."""


def find_for_script(experiment: Experiment, environ, args) -> Found:
    """The Python to run a program of ours with, made where it is ours.

    Raises:
        UsageError: if the program does not take what is given.
    """
    try:
        experiment.settings.parse(args.overrides)
    except SystemExit as error:
        raise UsageError(str(error)) from None
    own = experiment.own
    variable = own.variable or "PYTHON"
    python = environ.get(variable)
    if not python and own is environment.LOOP and not lacking_in(sys.executable, variable, own.packages):
        python = sys.executable
    if not python:
        python = str(own.python) if args.dry_run else environment.ensure_python(own)
    return Found(python, variable)


def find_patched(experiment: Experiment, version: str | None, environ, cwd: Path, is_dry: bool) -> Found:
    """The Python and the patched verl to run with, made where they are ours."""
    on_cpu = experiment.is_on_cpu
    # run_experiment.sh has started us with PYTHON, where it is set.
    python = sys.executable if environ.get("PYTHON") or not on_cpu else None
    chosen = target.named(environ, cwd)
    if version and (chosen or not on_cpu):
        where = chosen.origin if chosen else experiment.name
        raise UsageError(f"verl={version} is for the copy that the demo makes, not for {where}: leave one of them out.")
    is_own = chosen is None and on_cpu
    version = version or environment.DEFAULT_VERL
    if chosen is None:
        chosen = environment.patched_copy(version) if on_cpu else target.imported(sys.executable)
    say("verl", f"{chosen.path} ({chosen.origin})")
    target.check_folder(cwd, chosen)
    if is_dry:
        return Found(python or str(environment.DEMO.python), "PYTHON", chosen.path)
    if not is_own:
        # Before anything is installed for it.
        target.check_patched(chosen)
    if on_cpu:
        python = python or environment.ensure_python()
    if is_own:
        environment.ensure_patched_copy(python, verl=version)
        target.check_patched(chosen)
    return Found(python, "PYTHON", chosen.path)


def find_installed(experiment: Experiment, environ, cwd: Path, is_dry: bool) -> Found:
    """The Python that verl 0.9 and gradloc are installed in, and that verl."""
    own = experiment.own
    if not experiment.is_on_cpu:
        python = environ.get(own.variable) or sys.executable
    elif is_dry:
        return Found(environ.get(own.variable) or str(own.python), own.variable)
    else:
        python = environment.ensure_python(own)
    chosen = target.imported(python, own.variable)
    say("verl", f"{chosen.path} ({chosen.origin})")
    target.check_folder(cwd, chosen)
    return Found(python, own.variable, chosen.path)


def draw_report(python: str, run_dir: Path) -> None:
    """Draws the run's page, or says why not: a user's own Python may lack what it needs."""
    page = run_dir / "report.html"
    line = [python, "-m", "gradloc.report", str(run_dir), "-o", str(page)]
    environ = {**os.environ, "PYTHONPATH": str(target.REPO)}
    done = subprocess.run(line, capture_output=True, text=True, env=environ, check=False)
    if done.returncode == 0:
        say("report", page)
    else:
        said = (done.stderr or done.stdout).strip().splitlines()
        say("report", f"not drawn ({said[-1] if said else 'no reason given'})")


def choose(args, environ) -> Experiment:
    """The experiment named, or the published one when its variables are set."""
    if args.name is not None and "=" in args.name:
        raise UsageError(f"{args.name} stands where the experiment's name belongs: name it first.")
    wrong = [text for text in args.overrides if "=" not in text and not text.startswith("~")]
    if wrong:
        raise UsageError(f"{wrong[0]!r} is not an override: write key=value.")
    if args.name is not None:
        return catalog.load(args.name)
    published = catalog.PUBLISHED
    if any(not environ.get(variable.name) for variable in published.variables):
        needed = ", ".join(variable.name for variable in published.variables)
        raise UsageError(
            f"set {needed} to run the published experiment ({published.name}), "
            f"or run `./run_experiment.sh {catalog.DEMO.name}`, which needs nothing."
        )
    return published


def take(overrides: list[str], name: str) -> str | None:
    """Takes `NAME=VALUE`, the last one, out of the overrides; None where there is none."""
    given = [text for text in overrides if text.startswith(f"{name}=")]
    overrides[:] = [text for text in overrides if text not in given]
    return given[-1].removeprefix(f"{name}=") if given else None


def results_folder(environ, cwd: Path, name: str, is_suite: bool = False) -> Path:
    """A folder that does not exist yet, or that of a suite which goes on.

    Raises:
        ExperimentError: if RUN_DIR names another one that exists.
    """
    if environ.get("RUN_DIR"):
        folder = cwd / target.folder_in(environ, "RUN_DIR")
        if os.path.exists(folder) and not (is_suite and (folder / suite.RECORD).is_file()):
            raise ExperimentError(f"RUN_DIR={folder} exists: name a folder that does not.")
        return folder
    return suite.free_name(target.REPO / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def command(python: str, experiment: Experiment, given: list[str]) -> list[str]:
    """What is run: verl's own entry point with the experiment's config, or the experiment's own program."""
    if experiment.script:
        return [python, *experiment.started_by, "-m", experiment.script, *given]
    config, overrides = experiment.arguments(given)
    fixed = ["--config-dir", str(catalog.CONFIGS), "--config-name", config]
    return [python, "-m", "verl.trainer.main_ppo", *fixed, *overrides]


def child_environment(
    environ, experiment: Experiment, verl: Path | None, run_dir: Path, material: Path | None
) -> dict[str, str]:
    """The variables that the trainer and Ray's workers get beyond the given ones.

    Args:
        environ: what the user has set.
        experiment: what is run.
        verl: the folder with `verl/`; None where a program of ours trains.
        run_dir: where this run's results go.
        material: the folder with model and data of an experiment on the CPU; None for another one.
    """
    given = environ.get("PYTHONPATH")
    added = {"GRADLOC_RUN_DIR": str(run_dir)}
    if material is not None:
        added["GRADLOC_DEMO_MATERIAL"] = str(material)
    if experiment.script:
        added |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return added | {"PYTHONPATH": os.pathsep.join(filter(None, [str(target.REPO), given]))}
    is_patched = not experiment.is_installed
    added["VERL_FILE_LOGGER_PATH"] = str(run_dir / "metrics.jsonl")
    if material is not None and not is_patched:
        added |= verl09.ENVIRONMENT
    modules = [added.get("VERL_USE_EXTERNAL_MODULES"), "lab.experiments.metrics_file"]
    if material is not None:
        if is_patched:
            modules.insert(0, "lab.experiments.cpu.device")
        # One thread a worker: two workers share two cores, and sums come out the same every time.
        added.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1,-1")
        # glibc keeps what a thread frees in an arena of the thread's own: of a worker's 4.5 GB, that were 3. Tensors of
        # 1 MB or more go back to the system.
        added.update(MALLOC_ARENA_MAX="2", MALLOC_MMAP_THRESHOLD_=str(2**20))
    # In the demo's own environment this repository is installed; a user's own may hold the package alone.
    folders = [str(verl)] * is_patched + [str(target.REPO)] * (material is None or not is_patched)
    added["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, given]))
    present = [m for m in environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
    added["VERL_USE_EXTERNAL_MODULES"] = ",".join(filter(None, [*present, *modules]))
    return added


def make_folder(folder: Path, exist_ok: bool = False) -> None:
    """Makes the results' folder, or says why it cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise ExperimentError(
            f"{folder} cannot be made ({error.strerror}): set RUN_DIR to a new folder in one that you may write to."
        ) from None


def lacking_in(python: str, variable: str, packages: Iterable[str]) -> list[str]:
    """The packages that a Python, which this variable names, does not have."""
    code = "import sys; from importlib.util import find_spec; print(*[m for m in sys.argv[1:] if not find_spec(m)])"
    return target.ask(python, variable, code, *packages).split()


def describe(line: list[str], run_dir: Path) -> None:
    """Says what is run and where its results go."""
    say("command", shlex.join(line))
    say("results", run_dir)


def say(word: str, text) -> None:
    print(f"{word + ':':<9}{text}", flush=True)
