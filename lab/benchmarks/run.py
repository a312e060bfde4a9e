# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks do: say which sources they measured, how far they have come, and keep and print the result."""

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
MACHINE = {"processor": platform.machine(), "cpus": os.cpu_count()}
Record = dict[str, Any]


def digest() -> str:
    """sha256 over the code of gradloc's core and search, of which comments and docstrings are no part."""
    sha256 = hashlib.sha256()
    for room in ("core", "search"):
        for path in sorted((REPO / "gradloc" / room).rglob("*.py")):
            sha256.update(path.name.encode() + b"\0" + ast.dump(_Bare().visit(ast.parse(path.read_bytes()))).encode())
    return sha256.hexdigest()


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of ``lab.benchmarks.<name>``, with ``--out``, the folder for what it writes."""
    made = argparse.ArgumentParser(prog=f"python -m lab.benchmarks.{name}", description=(doc or "").split("\n")[0])
    made.add_argument("--out", type=Path, default=REPO / "runs" / "benchmarks" / name.rpartition(".")[2])
    return made


def as_typed(name: str, arguments: list[str] | None = None) -> str:
    """What to type for this run of ``lab.benchmarks.<name>``; where it was written to is no part of it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return shlex.join(["python", "-m", f"lab.benchmarks.{name}", *given])


def write(record: Record, out: Path, name: str) -> None:
    """``name.json`` in the folder ``out``, replaced at once. JSON has no NaN and no infinity: null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [finite(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    out.mkdir(parents=True, exist_ok=True)
    scratch = out / f"{name}.json.new"
    text = json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False)
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(out / f"{name}.json")


def finish(record: Record, out: Path, name: str, text: str) -> None:
    """Keep the record and its tables, ``text``, and print them."""
    write(record, out, name)
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def table(rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = (list(map(str, row)) for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def on_two_ranks(function: str, cells: Sequence[dict[str, Any]]) -> list[Record]:
    """What ``function`` (``module.name``) returns on two gloo ranks for each cell, its arguments; and the cell."""
    from tests.world import World

    progress, rows = Progress(len(cells)), []
    with World(2) as world:
        for cell in cells:
            progress.step(" ".join(map(str, cell.values())))
            first, other = world.run(function, **cell)
            assert first == other, "every rank finds the same"
            rows.append({**cell, **first})
    return rows


def exit_code(rows: list[Record], problems: Callable[[Record], list[str]]) -> int:
    """1 if a row has problems, which are printed; else 0."""
    wrong = [(row, problems(row)) for row in rows if problems(row)]
    for row, sentences in wrong:
        print(f"{row}: {'; '.join(sentences)}", file=sys.stderr)
    return 1 if wrong else 0


class Progress:
    """A bar on one line of stderr that counts to ``total``; plain lines where stderr is not a terminal."""

    def __init__(self, total: int):
        self.total = total
        self._done = 0
        self._started = time.perf_counter()

    def step(self, what: str) -> None:
        """One more is done; ``what`` was it."""
        self._done += 1
        seconds = time.perf_counter() - self._started
        left = seconds / self._done * (self.total - self._done)
        filled = round(24 * self._done / self.total)
        bar = f"[{'#' * filled}{'.' * (24 - filled)}] {self._done}/{self.total}"
        line = f"{bar} {seconds:.0f} s, about {left:.0f} s left: {what}"
        if sys.stderr.isatty():
            end = "\n" if self._done == self.total else ""
            print(f"\r\x1b[2K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
