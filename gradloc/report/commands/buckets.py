# SPDX-License-Identifier: Apache-2.0
"""Draw and print a run's gradient analyses: ``gradloc buckets``."""

import argparse
import csv
import io
from pathlib import Path
from typing import Any

from ...explain.text import first_of
from .. import output
from ..errors import ReportError
from ..pages import terminal
from ..runs.buckets import StepBuckets, from_json, read_analyses, read_wandb, to_json

OUTPUTS = "gradient_analysis_outputs"
STEPS = (0, 20, 40)
DPI = 150
EPILOG = """\
examples:
  gradloc buckets runs/demo-1 --list-steps
  gradloc buckets runs/demo-1 --step 1 51
  gradloc buckets runs/demo-1 --json
  gradloc buckets --wandb-path ENTITY/PROJECT/RUN_ID --step 1
  gradloc buckets --mode ppo --step0-dir A --step20-dir B --step40-dir C --out ppo.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--wandb-path", metavar="ENTITY/PROJECT/RUN_ID", help="read the run from Weights & Biases")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list-steps", action="store_true", help="print the analysed steps")
    form.add_argument("--json", action="store_true", help="print the numbers, draw nothing")
    parser.add_argument("--step", "--steps", nargs="+", type=int, metavar="N", help="only these steps")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help=f"default: {OUTPUTS}/<run's name>")
    three = parser.add_argument_group("one figure of three steps")
    three.add_argument("--mode", choices=("grpo", "ppo"), help="what the figure's title says")
    for step in STEPS:
        three.add_argument(f"--step{step}-dir", type=Path, metavar="DIR", help="files of one step, from --step")
    three.add_argument("--out", type=Path, metavar="PNG", help="where the figure goes")


def run(args: argparse.Namespace) -> int:
    if any(getattr(args, f"step{step}_dir") for step in STEPS) or args.mode or args.out:
        return _three_steps(args)
    if (args.run_dir is None) == (args.wandb_path is None):
        raise ReportError("name one run: its folder, or --wandb-path ENTITY/PROJECT/RUN_ID.")
    if args.run_dir is not None:
        analyses, notes = read_analyses(args.run_dir)
        name = args.run_dir.resolve().name
    else:
        analyses, notes, name = read_wandb(args.wandb_path, args.step)
    if args.json:
        steps = []
        for analysis in chosen(analyses, args.step):
            groups = [{"bucket": bucket, "reward_std": std} for bucket, std in analysis.table]
            steps.append(to_json(analysis) | {"groups": groups})
        output.deliver(None, output.as_json({"steps": steps, "notes": notes}))
        return 0
    terminal.warn(notes)
    if args.list_steps:
        for analysis in analyses.values():
            rows = analysis.get("all", "sample_count")
            print(f"step {analysis.step}: {len(analysis.buckets)} buckets, {rows:.0f} rows")
        return 0
    drawn = chosen(analyses, args.step)
    folder = args.output_dir or Path(OUTPUTS) / name
    folder.mkdir(parents=True, exist_ok=True)
    for analysis in drawn:
        for path in write(analysis, folder):
            output.say(path)
    return 0


def chosen(analyses: dict[int, Any], steps: list[int] | None) -> list[Any]:
    """Return the analyses of these steps, or of all; raise ReportError where a step was not analysed."""
    for step in steps or ():
        if step not in analyses:
            raise ReportError(f"step {step} was not analysed; those that were: {first_of([*map(str, analyses)])}.")
    return [analyses[step] for step in steps or analyses]


def write(analysis: StepBuckets, folder: Path) -> list[Path]:
    """Write the files of one step: five figures, the metrics and the groups' deviations; return their paths."""
    from ..figures.buckets import FIGURES

    def path_of(name: str, ending: str) -> Path:
        return folder / f"gradient_analysis_{name}_step_{analysis.step}.{ending}"

    paths = []
    for name, (_, draw) in FIGURES.items():
        paths.append(path_of(name, "png"))
        save(draw(analysis), paths[-1])
    metrics, table = path_of("metrics", "json"), path_of("bucket_rv_table", "csv")
    output.write(metrics, output.as_json(to_json(analysis)))
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows([("bucket", "reward_std"), *analysis.table])
    output.write(table, rows.getvalue())
    return [*paths, metrics, table]


def save(figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the path's ending; the same bytes for the same figure."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    varying = "Date" if path.suffix == ".svg" else "Software"
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gradloc"}):
        figure.savefig(drawn, format=path.suffix[1:], dpi=DPI, metadata={varying: None})
    output.write(path, drawn.getvalue())


def _three_steps(args) -> int:
    from ..figures.buckets import three_steps

    if args.run_dir is not None or args.wandb_path is not None or args.list_steps or args.json:
        raise ReportError("the figure of three steps is of --step0-dir, --step20-dir and --step40-dir: name no run.")
    folders = {f"--step{step}-dir": getattr(args, f"step{step}_dir") for step in STEPS}
    missing = [name for name, value in {**folders, "--mode": args.mode, "--out": args.out}.items() if value is None]
    if missing:
        raise ReportError(f"the figure of three steps also needs {', '.join(missing)}.")
    analyses = [from_json(_metrics_file(folder)) for folder in folders.values()]
    if not set.intersection(*(set(analysis.buckets) for analysis in analyses)):
        raise ReportError("the three steps have no bucket in common.")
    out = args.out if args.out.suffix else args.out.with_suffix(".png")
    if args.out.is_dir() or out.suffix not in (".png", ".svg"):
        raise ReportError(f"--out must be a file that ends in .png or .svg, found {args.out}.")
    save(three_steps(analyses, f"{args.mode.upper()}: gradient by reward variance"), out)
    output.say(out)
    return 0


def _metrics_file(folder: Path) -> Path:
    files = sorted(folder.glob("gradient_analysis_metrics_step_*.json")) or sorted(folder.glob("metrics.json"))
    if len(files) != 1:
        raise ReportError(
            f"{folder} holds {len(files)} gradient_analysis_metrics_step_*.json: name a folder "
            "with one, made by `gradloc buckets RUN_DIR --step N --output-dir DIR`."
        )
    return files[0]
