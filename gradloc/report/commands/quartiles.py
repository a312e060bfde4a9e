# SPDX-License-Identifier: Apache-2.0
"""``gradloc quartiles``: which tokens' gradients dominate, by probability."""

import argparse
from pathlib import Path

from rich.table import Table

from ...explain.numbers import number, percent
from ...record.analysis import QUARTILES, Moved, QuartileAnalysis, Update
from ...record.reading import read
from .. import output
from ..pages import terminal
from ..runs.buckets import read_steps
from .buckets import chosen, save

OUTPUTS = "quartile_analysis_outputs"
UPDATES = {"all": "all tokens", "lowest": "q1 only", "highest": "q4 only", "none": "no gradient"}
EPILOG = """\
examples:
  gradloc quartiles runs/quartiles-demo-1
  gradloc quartiles runs/quartiles-demo-1 --step 17 --format svg
  gradloc quartiles runs/quartiles-demo-1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--step", "--steps", nargs="+", type=int, metavar="N", help="only these steps")
    parser.add_argument("--json", action="store_true", help="print the numbers, draw nothing")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the figures")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help=f"default: {OUTPUTS}/<run's name>")


def run(args: argparse.Namespace) -> int:
    analyses, notes = read_steps(args.run_dir, "quartile", _from_record)
    wanted = chosen(analyses, args.step)
    if args.json:
        output.deliver(None, output.as_json({"steps": wanted, "notes": notes}))
        return 0
    terminal.warn(notes)
    from ..figures.quartiles import SPLITS, figure_of

    folder = args.output_dir or Path(OUTPUTS) / args.run_dir.resolve().name
    for analysis in wanted:
        _print(analysis, SPLITS.get(analysis.split, analysis.split))
        path = folder / f"quartiles_step_{analysis.global_step}.{args.format}"
        save(figure_of(analysis), path)
        output.say(f"{path}\n")
    return 0


def _from_record(record: dict) -> QuartileAnalysis:
    analysis = read(QuartileAnalysis, record)
    if len(analysis.quartiles) != len(QUARTILES):
        raise ValueError(f"{len(analysis.quartiles)} quartiles")
    return analysis


def _print(analysis: QuartileAnalysis, what: str) -> None:
    console = terminal.console(soft_wrap=True)
    console.width = max(console.width, 92)  # the table's
    console.print(
        f"Step {analysis.global_step}: {analysis.whole.num_tokens:,} tokens in {what}; "
        f"gradient norm {number(analysis.whole.norm, 3)}, "
        f"the parts miss it by {number(analysis.closure, 2)} of that."
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("", "tokens", "mean 1-π", "norm", "gradient", "log π", "(c)", "(e)", "(f)"):
        table.add_column(head, justify="right", no_wrap=True)
    moved = [_mean_changes(analysis.updates.get(name)) for name in ("all", "lowest", "highest")]
    for index, quartile in enumerate(analysis.quartiles):
        table.add_row(
            quartile.name,
            f"{quartile.num_tokens:,} ({percent(quartile.token_share)})",
            number(quartile.one_minus_probability, 3),
            number(quartile.norm, 3) if quartile.num_tokens else "–",
            percent(quartile.gradient_share),
            number(quartile.median_log_prob_norm, 3),
            *(changes[index] for changes in moved),
        )
    console.print(table)
    correlation = number(analysis.rank_correlation.log_prob_norm, 2)
    console.print(
        "norm: of the part that the quartile's tokens have in the gradient. gradient: their share "
        "of it; the shares add up to 1. log π: median norm of single tokens' gradients of log π "
        f"({len(analysis.tokens)} tokens; rank correlation with 1-π: {correlation}). (c), (e), "
        "(f): mean size of the change of probability after an update of all tokens, of q1, of q4."
    )
    console.print(f"{analysis.optimizer.name}, learning rate {number(analysis.optimizer.learning_rate, 3)}:")
    for name in UPDATES:
        console.print(f"  {UPDATES[name]}: {_update(name, analysis.updates.get(name))}")


def _mean_changes(update: Update | None) -> list[str]:
    """Return the mean |change| of probability in each quartile."""
    if update is None or update.changes is None:
        return ["–"] * len(QUARTILES)
    return ["–" if change is None else number(change.mean_abs, 2) for change in update.changes.quartiles]


def _update(name: str, update: Update | None) -> str:
    if update is None:
        return "no gradient, no update"
    if update.changes is None:
        return f"the gradient's norm is {number(update.grad_norm)}, so no step was taken"
    sizes = f"gradient {number(update.grad_norm, 3)}, step {number(update.update_norm, 3)}"
    if name == "none":
        return f"{sizes} (the optimizer's momentum and weight decay)"
    if name == "all":
        return sizes
    raw, own = _against_all(update.changes), _against_all(update.own_changes)
    return f"{sizes}; changes against all tokens': {raw}; without momentum {own}"


def _against_all(moved: Moved | None) -> str:
    if moved is None or moved.agreement is None:
        return "–"
    return f"r = {number(moved.agreement.correlation, 2)}, size x {number(moved.agreement.ratio, 2)}"
