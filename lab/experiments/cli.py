# SPDX-License-Identifier: Apache-2.0
"""The command line of run_experiment.sh: choose an experiment, check it, print what it will run, run it."""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from lab.experiments import catalog, environment, launch, suite, target, verdict, verl09
from lab.experiments.catalog import Experiment
from lab.experiments.errors import ExperimentError, UsageError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="./run_experiment.sh",
        description="Run lab/experiments/NAME.yaml with verl's own trainer.",
        epilog=Path(__file__).with_name("usage.txt").read_text(encoding="utf-8"),
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
    """Run the command line; return the exit code."""
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
    """Prepare one experiment and run it, or print what it would run."""
    for name in ("PYTHON", "VERL09_PYTHON", "TRL_PYTHON", "LOOP_PYTHON"):
        if os.sep in environ.get(name, ""):  # it also runs from other folders
            environ[name] = os.path.abspath(environ[name])
    version = take(args.overrides, "verl")
    experiment = catalog.form_for(choose(args, environ), version, take(args.overrides, "trainer") or "verl")
    problem = experiment.problem(environ)
    if problem:
        raise ExperimentError(problem)
    cells = suite.plan(experiment, args.arms, args.seeds, args.overrides)
    if experiment.script:
        try:
            experiment.settings.parse(args.overrides)
        except SystemExit as error:
            raise UsageError(str(error)) from None
    python, verl = find(experiment, version, environ, cwd, args.dry_run)
    run_dir = results_folder(environ, cwd, experiment)
    if args.dry_run:
        for cell in cells:
            describe(command(python, experiment, cell["overrides"]), run_dir / cell["folder"])
        return 0
    check_imports(python, experiment)
    material = (
        environment.ensure_material(python, experiment.material) if experiment.own and experiment.material else None
    )
    before = dict(environ)
    make_folder(run_dir)
    with launch.plain_path(python) as plain:

        def run_one(overrides: list[str], folder: Path) -> int:
            folder.mkdir(exist_ok=True)
            os.environ.update(child_environment(before, experiment, verl, folder, material))
            line = command(plain, experiment, overrides)
            if experiment.nodes > 1:
                line = [plain, "-m", "lab.experiments.cpu.nodes", str(experiment.nodes), *line]
            describe(line, folder)
            code = launch.run(line, folder / "console.log", is_brief=bool(experiment.own) and not args.verbose)
            if code == 0 and (folder / "gradloc" / "events.jsonl").is_file():
                draw_report(python, folder)
            return code

        if experiment.arms:
            code = suite.run(experiment, cells, run_dir, run_one, plain)
        else:
            code = run_one(args.overrides, run_dir)
    if code == 0 and "gradloc=off" not in args.overrides:
        if experiment.is_planted:
            code = verdict.main([str(run_dir)])
        elif experiment.script:
            print(f"\n{(run_dir / 'summary.md').read_text(encoding='utf-8')}")
    say("results", run_dir)
    return code


def find(experiment: Experiment, version: str | None, environ, cwd: Path, is_dry: bool) -> tuple[str, Path | None]:
    """Return the interpreter, and the folder with `verl/` (None for our own programs); unless `is_dry`, make ours.

    The verl to patch is `VERL_REPO`, else the current folder if it is verl, else the demo's own copy on the CPU, what
    Python imports on GPUs.
    """
    if experiment.script:
        return find_python(experiment, environ, is_dry), None
    if experiment.is_installed:
        python = find_python(experiment, environ, is_dry)
        if is_dry and experiment.own:  # its environment may not exist yet
            return python, None
        verl = target.imported(python, experiment.python_variable)
        announce(verl, cwd)
        return python, verl.path
    verl = target.named(environ, cwd) or (None if experiment.own else target.imported(sys.executable))
    if verl and version:
        raise UsageError(
            f"verl={version} is for the copy that the demo makes, not for {verl.origin}: omit one of them."
        )
    copied = f"verl {experiment.verl}, the demo's own patched copy"
    announce(verl or target.Target(environment.patched_copy(), copied), cwd)
    if is_dry:
        return find_python(experiment, environ, is_dry), None
    if verl:
        target.check_patched(verl.path)  # before anything is installed
    python = find_python(experiment, environ, is_dry)
    return python, verl.path if verl else environment.ensure_patched_copy(python)


def announce(verl: target.Target, cwd: Path) -> None:
    """Print which verl will run, after checking that Ray's workers will import it."""
    target.check_folder(cwd, verl.path)
    say("verl", f"{verl.path} ({verl.origin})")


def find_python(experiment: Experiment, environ, is_dry: bool) -> str:
    """Return the interpreter to run with; unless `is_dry`, make the environment of a run on the CPU."""
    variable, own = experiment.python_variable, experiment.own
    if environ.get(variable):
        # run_experiment.sh has started this process with PYTHON
        return sys.executable if variable == "PYTHON" else environ[variable]
    if own is None or (
        own is environment.LOOP and set(own.packages) <= target.locate(sys.executable, variable, *own.packages).keys()
    ):
        return sys.executable
    return str(own.python) if is_dry else environment.ensure_python(own)


def check_imports(python: str, experiment: Experiment) -> None:
    """Refuse a Python that lacks packages of the experiment."""
    present = target.locate(python, experiment.python_variable, *experiment.imports)
    lacking = [module for module in experiment.imports if module not in present]
    if lacking:
        raise ExperimentError(
            f"{python} lacks {', '.join(lacking)}, which {experiment.name} needs: install that for it, or set "
            f"{experiment.python_variable} to a Python that has it."
        )


def draw_report(python: str, run_dir: Path) -> None:
    """Draw the run's page, or print why not: a user's own Python may lack the packages."""
    page = run_dir / "report.html"
    command = [python, "-m", "gradloc.report", str(run_dir), "-o", str(page)]
    try:
        target.output_of(command, "not drawn", env={**os.environ, "PYTHONPATH": str(target.REPO)})
        say("report", page)
    except ExperimentError as error:
        say("report", error)


def choose(args, environ) -> Experiment:
    """Return the experiment named, or the published one if its variables are set."""
    if args.name is not None and "=" in args.name:
        raise UsageError(f"{args.name} is in the place of the experiment's name: name it first.")
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
    """Remove every `NAME=VALUE` from the overrides; return the last value, or None."""
    given = [text for text in overrides if text.startswith(f"{name}=")]
    overrides[:] = [text for text in overrides if text not in given]
    return given[-1].removeprefix(f"{name}=") if given else None


def results_folder(environ, cwd: Path, experiment: Experiment) -> Path:
    """Return a folder that does not exist yet, or that of a suite to resume.

    Raises:
        ExperimentError: if RUN_DIR names another one that exists.
    """
    given = target.folder_in(environ, "RUN_DIR")
    if given is None:
        return suite.free_name(target.REPO / "runs" / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = cwd / given
    if os.path.exists(folder) and not (experiment.arms and (folder / suite.RECORD).is_file()):
        raise ExperimentError(f"RUN_DIR={folder} exists: name a folder that does not.")
    return folder


def command(python: str, experiment: Experiment, given: list[str]) -> list[str]:
    """Return the command: verl's entry point with the experiment's config, or the experiment's own program."""
    if experiment.script:
        return [python, *experiment.started_by, "-m", experiment.script, *given]
    config, overrides = experiment.arguments(given)
    fixed = ["--config-dir", str(catalog.CONFIGS), "--config-name", config]
    return [python, "-m", "verl.trainer.main_ppo", *fixed, *overrides]


def child_environment(
    environ, experiment: Experiment, verl: Path | None, run_dir: Path, material: Path | None
) -> dict[str, str]:
    """Return the variables that the trainer and Ray's workers get in addition to the user's.

    Args:
        environ: the user's.
        experiment: the one that runs.
        verl: the folder with `verl/`; None for our own programs.
        run_dir: this run's results folder.
        material: the folder with model and data of an experiment on the CPU; else None.
    """
    added = {"GRADLOC_RUN_DIR": str(run_dir)}
    folders = [str(target.REPO), environ.get("PYTHONPATH")]
    if material is not None:
        added["GRADLOC_DEMO_MATERIAL"] = str(material)
    if experiment.script:
        added.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    else:
        added["VERL_FILE_LOGGER_PATH"] = str(run_dir / "metrics.jsonl")
        modules = environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
        if not experiment.is_installed:
            folders.insert(0, str(verl))
        if material is not None:
            # One thread per worker: two workers share two cores, and sums are reproducible.
            added.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1,-1")
            # glibc keeps freed memory in an arena per thread, 3 of a worker's 4.5 GB. These limits return tensors of
            # 1 MB or more to the system.
            added.update(MALLOC_ARENA_MAX="2", MALLOC_MMAP_THRESHOLD_=str(2**20))
            added |= verl09.ENVIRONMENT if experiment.is_installed else {}
            modules.append(added.get("VERL_USE_EXTERNAL_MODULES", "lab.experiments.cpu.device"))
        added["VERL_USE_EXTERNAL_MODULES"] = ",".join(filter(None, [*modules, "lab.experiments.metrics_file"]))
    return added | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def make_folder(folder: Path) -> None:
    """Make the results' folder, or raise an `ExperimentError` with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError(
            f"{folder} cannot be made ({error.strerror}): set RUN_DIR to a new folder in one that you may write to."
        ) from None


def describe(line: list[str], run_dir: Path) -> None:
    """Print the command and its results' folder."""
    say("command", shlex.join(line))
    say("results", run_dir)


def say(word: str, text) -> None:
    print(f"{word + ':':<9}{text}", flush=True)
