# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's run says of itself: which sources it measured, and how far it has come."""

import ast
import hashlib
import shlex
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def digest() -> str:
    """sha256 over the code of gradloc's core and search, of which comments and docstrings are no part."""
    found = hashlib.sha256()
    for room in ("core", "search"):
        for path in sorted((REPO / "gradloc" / room).rglob("*.py")):
            found.update(path.name.encode() + b"\0" + ast.dump(_Bare().visit(ast.parse(path.read_bytes()))).encode())
    return found.hexdigest()


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def as_typed(name: str, arguments: list[str] | None = None) -> str:
    """What to type for this run of ``benchmarks.<name>``; where it was written to is no part of it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return shlex.join(["python", "-m", f"benchmarks.{name}", *given])


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
        line = (
            f"[{'#' * filled}{'.' * (24 - filled)}] {self._done}/{self.total} "
            f"{seconds:.0f} s, about {left:.0f} s left: {what}"
        )
        if sys.stderr.isatty():
            end = "\n" if self._done == self.total else ""
            print(f"\r\x1b[2K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
