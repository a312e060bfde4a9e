# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmarks: the digest of the measured sources, the command line, progress, and the record."""

import argparse
import ast
import hashlib
import multiprocessing
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the argument parser of ``lab.benchmarks.<name>``, with the output folder ``--out``."""
    made = argparse.ArgumentParser(prog=f"python -m lab.benchmarks.{name}", description=(doc or "").split("\n")[0])
    made.add_argument("--out", type=Path, default=REPO / "runs" / "benchmarks" / name.rpartition(".")[2])
    return made


def as_typed(name: str, arguments: list[str] | None = None) -> str:
    """Return the command that repeats this run of ``lab.benchmarks.<name>``, without ``--out``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return shlex.join(["python", "-m", f"lab.benchmarks.{name}", *given])


def in_processes(work: Callable[..., Any], cells: Sequence[tuple[Any, ...]], processes: int = 2) -> Iterator[Any]:
    """Yield ``work(*cell)`` of each cell as it ends, computed in spawned processes, and show a bar."""
    from tqdm import tqdm  # imported here, since the GPU's benchmark needs torch alone

    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from tqdm(pool.imap_unordered(partial(_call, work), cells), total=len(cells))


def _call(work: Callable[..., Any], cell: tuple[Any, ...]) -> Any:
    return work(*cell)


def about(name: str, arguments: list[str] | None = None) -> Record:
    """Return what every record says of its origin: the command, the code, the machine."""
    return {"command": as_typed(name, arguments), "core_sha256": digest(), "machine": MACHINE}


def write(record: Record, out: Path, name: str) -> None:
    """Write ``name.json`` in the folder ``out``, which is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}.json", record)


def finish(record: Record, out: Path, name: str, text: str) -> None:
    """Write the record and its tables, ``text``, and print the tables."""
    write(record, out, name)
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
