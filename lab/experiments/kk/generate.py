# SPDX-License-Identifier: Apache-2.0
"""Write Knights-and-Knaves data sets for verl, or check an existing one.

    python -m lab.experiments.kk.generate --people 3 4 5 6 7 --train 900 --test 100 --out data/kk
    python -m lab.experiments.kk.generate --check data/kk/train.parquet

`OUT/train.parquet` holds all training puzzles, shuffled; `OUT/test-Nppl.parquet` the test puzzles
of N people. No puzzle is in two files, and each has exactly one solution.
"""

import argparse
import random
import sys
from pathlib import Path

from lab.experiments.cpu import material
from lab.experiments.errors import ExperimentError
from lab.experiments.kk import puzzle, wording

SHOWN = 5
"""Number of wrong rows to name; all are counted."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m lab.experiments.kk.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--people", type=int, nargs="+", choices=range(2, 8), metavar="N", help="2 to 7; 3 to 7 published"
    )
    made.add_argument("--train", type=int, default=900, help="training puzzles for each N (900)")
    made.add_argument("--test", type=int, default=100, help="test puzzles for each N (100)")
    made.add_argument("--seed", type=int, default=0, help="the same seed, the same files (0)")
    made.add_argument("--out", type=Path, help="the folder to write to")
    made.add_argument("--check", type=Path, metavar="FILE", help="check a parquet file's puzzles")
    return made


def main(argv=None) -> int:
    """Run the command line; return the exit code."""
    options = parser()
    args = options.parse_args(argv)
    if not args.check and (not args.people or args.out is None or args.train < 1 or args.test < 0):
        options.error("--people and --out are needed, or --check FILE; --train is at least 1, --test at least 0.")
    try:
        return check(args.check) if args.check else generate(args)
    except ExperimentError as error:
        said = str(error)
    except ImportError as error:
        said = f"{sys.executable}: {error}: install it, or use the demo's .gradloc/venv/bin/python."
    except OSError as error:
        said = f"{error}: name a folder that can be written to."
    print(f"generate: {said}", file=sys.stderr)
    return 1


def generate(args) -> int:
    """Draw and write the data sets."""
    parts = {"train": []}
    for number in sorted(set(args.people)):
        # a random stream for each N, so that adding an N does not change the others' puzzles
        found = puzzle.draw(args.train + args.test, number, random.Random(f"knights {args.seed} {number}"))
        parts["train"] += found[: args.train]
        parts[f"test-{number}ppl"] = found[args.train :]
    random.Random(f"order {args.seed}").shuffle(parts["train"])
    for path in (args.out / f"{name}.parquet" for name in parts):
        if path.exists():
            raise ExperimentError(f"{path} exists: name another folder, or remove it.")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, puzzles in parts.items():
        if puzzles:
            kind = name.partition("-")[0]
            material.write_rows(args.out, name, puzzles, lambda i, one, _, kind=kind: wording.to_row(i, one, kind))
            print(f"{args.out / name}.parquet: {len(puzzles)} puzzles")
    return 0


def check(path: Path) -> int:
    """Refuse a file if a row is not a puzzle whose stated solution is its only one.

    Raises:
        ExperimentError: naming the first such rows.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise ExperimentError(f"{path} is not a file: name a parquet file of puzzles.")
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise ExperimentError(f"{path} cannot be read as parquet ({said}).") from None
    wrong = [(i, said) for i, said in enumerate(map(wording.problem, rows)) if said]
    if wrong:
        named = "; ".join(f"row {i}: {said}" for i, said in wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ExperimentError(
            f"{len(wrong)} of the {len(rows)} rows of {path} cannot be trained on: {named}{more}. "
            "Remove them, or generate the file anew."
        )
    print(f"{path}: {len(rows)} puzzles, each with exactly one solution, the one it states")
    return 0


if __name__ == "__main__":
    sys.exit(main())
