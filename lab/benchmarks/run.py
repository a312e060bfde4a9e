# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmarks: the digest of the measured sources, the command line, progress, and the record."""

import argparse
import ast
import hashlib
import multiprocessing
import os
import platform
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lab.output import write_json

REPO = Path(__file__).resolve().parents[2]
MACHINE = {"processor": platform.machine(), "cpus": os.cpu_count()}
Record = dict[str, Any]


def digest() -> str:
    """Return the sha256 of the code of gradloc's core and search, without comments and docstrings."""
    sha256 = hashlib.sha256()
    for room in ("core", "search"):
        for path in sorted((REPO / "gradloc" / room).rglob("*.py")):
            sha256.update(path.name.encode() + b"\0" + ast.dump(_Bare().visit(ast.parse(path.read_bytes()))).encode())
    return sha256.hexdigest()


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


class Parser(argparse.ArgumentParser):
    """The argument parser of ``lab.benchmarks.NAME``, with the output folder ``--out``.

    What it returns also has the benchmark's ``name``, and the ``command`` that repeats this run, without ``--out``.
    """

    def __init__(self, name: str, doc: str | None):
        super().__init__(prog=f"python -m lab.benchmarks.{name}", description=(doc or "").split("\n")[0])
        self.add_argument("--out", type=Path, default=REPO / "runs" / "benchmarks" / name)
        self.set_defaults(name=name)

    def add_seeds(self, count: int, about: str) -> None:
        """Add the options ``--seeds``, a number of fresh ones, and ``--seed``; see :func:`seeds_of`."""
        self.add_argument("--seeds", type=int, default=count, help=about)
        self.add_argument("--seed", type=int, action="append", help="these seeds instead")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        parsed = super().parse_args(given, namespace)
        if "--out" in given:
            at = given.index("--out")
            del given[at : at + 2]
        parsed.command = shlex.join([*self.prog.split(), *given])
        return parsed


def seeds_of(parsed: argparse.Namespace, times: int = 1) -> list[int]:
    """Return the given seeds, else ``times`` as many fresh ones as asked for."""
    fresh = random.SystemRandom()
    return parsed.seed or [fresh.randrange(2**28) for _ in range(times * parsed.seeds)]


def in_processes(work: Callable[..., Any], cells: Sequence[tuple[Any, ...]], processes: int = 2) -> Iterator[Any]:
    """Yield ``work(*cell)`` of each cell as it ends, computed in spawned processes, and show a bar."""
    from tqdm import tqdm  # imported here, since the GPU's benchmark needs torch alone

    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in tqdm(as_completed([pool.submit(work, *cell) for cell in cells]), total=len(cells)):
            yield done.result()


def about(parsed: argparse.Namespace) -> Record:
    """Return what every record says of its origin: the command, the code, the machine."""
    return {"command": parsed.command, "core_sha256": digest(), "machine": MACHINE}


def write(record: Record, out: Path, name: str) -> None:
    """Write ``name.json`` in the folder ``out``, which is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}.json", record)


def finish(parsed: argparse.Namespace, record: Record, text: str, name: str = "") -> None:
    """Write the record with its origin and its tables, ``text``, and print the tables; ``name`` of other files."""
    name = name or parsed.name
    write({**about(parsed), **record}, parsed.out, name)
    (parsed.out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
