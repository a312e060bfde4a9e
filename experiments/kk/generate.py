# SPDX-License-Identifier: Apache-2.0
"""Writes Knights-and-Knaves data sets as verl reads them, or checks one that exists.

    python -m experiments.kk.generate --people 3 4 5 6 7 --train 900 --test 100 --out data/kk
    python -m experiments.kk.generate --check data/kk/train.parquet

`OUT/train.parquet` holds all training puzzles, shuffled; `OUT/test-Nppl.parquet` the test puzzles
of N people. No puzzle is in two files, and each has exactly one solution.
"""

import argparse
import random
import sys
from importlib.util import find_spec
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.kk import puzzle, wording

SHOWN = 5
"""How many wrong rows are named; all are counted."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.kk.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--people", type=int, nargs="+", metavar="N", help="2 to 7; 3 to 7 published")
    made.add_argument("--train", type=int, default=900, help="training puzzles for each N (900)")
    made.add_argument("--test", type=int, default=100, help="test puzzles for each N (100)")
    made.add_argument("--seed", type=int, default=0, help="the same seed, the same files (0)")
    made.add_argument("--out", type=Path, help="the folder to write to")
    made.add_argument("--check", type=Path, metavar="FILE", help="check a parquet file's puzzles")
    return made


def main(argv=None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        missing = [name for name in ("pysat", "pyarrow") if find_spec(name) is None]
        if missing:
            raise ExperimentError(
                f"{sys.executable} lacks {' and '.join(missing)}: install requirements/demo.txt, "
                "or use the demo's .gradloc/venv/bin/python."
            )
        return check(args.check) if args.check else generate(args)
    except ExperimentError as error:
        print(f"generate: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"generate: {error}: name a folder that can be written to.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


def generate(args) -> int:
    """Draws and writes what the arguments ask for."""
    if not args.people or args.out is None:
        raise ExperimentError("--people and --out are needed, or --check FILE.")
    few, most = puzzle.FEWEST, puzzle.MOST
    for number in args.people:
        if not few <= number <= most:
            raise ExperimentError(f"--people {number} is not from {few} to {most}: choose from these.")
    for option, value in (("--train", args.train), ("--test", args.test)):
        if value < 0 or (option == "--train" and value == 0):
            raise ExperimentError(f"{option} {value} is not a number of puzzles: give a positive one.")
    written = ["train.parquet", *(f"test-{number}ppl.parquet" for number in args.people)]
    for name in written:
        if (args.out / name).exists():
            raise ExperimentError(f"{args.out / name} exists: name another folder, or remove it.")
    args.out.mkdir(parents=True, exist_ok=True)
    train, tests = [], {}
    for number in sorted(set(args.people)):
        # A stream for each N: adding an N changes no other's puzzles.
        rng = random.Random(f"knights {args.seed} {number}")
        found = puzzle.draw(args.train + args.test, number, rng, report=progress(number, args))
        train += found[: args.train]
        tests[number] = found[args.train :]
    random.Random(f"order {args.seed}").shuffle(train)
    write(args.out / "train.parquet", train, "train")
    for number, part in tests.items():
        if part:
            write(args.out / f"test-{number}ppl.parquet", part, "test")
    return 0


def progress(number: int, args):
    """A line on stderr that counts the puzzles of one N."""
    total = args.train + args.test

    def report(done: int) -> None:
        if done % 100 == 0 or done == total:
            end = "\n" if done == total else "\r"
            print(f"{number} people: {done}/{total} puzzles", end=end, file=sys.stderr, flush=True)

    return report


def write(path: Path, puzzles: list[puzzle.Puzzle], split: str) -> None:
    """Writes one parquet file and says so."""
    import pyarrow
    import pyarrow.parquet

    rows = [wording.to_row(i, one, split) for i, one in enumerate(puzzles)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} puzzles")


def check(path: Path) -> int:
    """Refuses a file with a row that is not a puzzle with exactly one solution, the one it states.

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
