# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: which changes of the code would the tests not notice?

    make mutants                                                     # 100 places, drawn by a seed
    .gradloc/venv/bin/python scripts/mutants.py --first 20 search    # of one room

Each mutant is one expression or statement changed, in a copy of the repository. The quick tests of its room run there
until one fails. What lives is printed: test the behaviour, delete the line, or see why nothing changes.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {room: f"gradloc/{room}" for room in "core search loop record words stabilize health reweighting".split()}
ROOMS["patchkit"] = "patchkit"
SEED, WORKERS = 20, 2
QUICK = "not full and not slow and not browser and not e2e and not verl09"

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
DELETED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)
LEFT_OUT = ("decorator_list", "returns", "annotation")


@dataclass(frozen=True)
class Mutant:
    """The source between two byte offsets of a file is replaced."""

    file: str
    line: int
    span: tuple[int, int]
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """The module's source with the change."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a module, in the order of its text.

    Left as they are: annotations, decorators, asserts, `strict=` of zip and text; f-strings, whose places Python 3.11
    misreports.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made: list[Mutant] = []

    def walk(node: ast.AST) -> None:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_strict = isinstance(node, ast.keyword) and node.arg == "strict"
        if is_text or is_strict or isinstance(node, ast.JoinedStr | ast.Assert):
            return
        for place, after in changes(node):
            span = (starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset)
            mutant = Mutant(file, place.lineno, span, " ".join(ast.unparse(place).split()), after)
            if is_python(mutant.applied(source)):
                made.append(mutant)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in LEFT_OUT:
                    walk(child)

    walk(ast.parse(source))
    return made


def is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What may stand in the place of a node, or of its conditions."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], SWAPS[type(op)](), *node.ops[index + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
        case ast.BoolOp():
            yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
        case ast.BinOp() if type(node.op) in SWAPS and not any(map(_is_text, (node.left, node.right))):
            yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Constant(value=float()):
            yield node, repr(2 * node.value or 1.0)
        case ast.Name(ctx=ast.Load(), id=name) | ast.Attribute(ctx=ast.Load(), attr=name) if name in NAMES:
            yield node, ast.unparse(node)[: -len(name)] + NAMES[name]
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield node, "return None"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.stmt() if isinstance(node, DELETED):
            yield node, "pass"
    for test in [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", []):
        # a comparison, or several joined, is changed as such
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            yield test, f"(not ({ast.unparse(test)}))"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# ---- trying them


def copy_of_the_repository(folder: Path) -> Path:
    """The working tree without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".gradloc").symlink_to(ROOT / ".gradloc")
    return folder


def what_fails(folder: Path, room: str, seconds: float) -> str:
    """The first of a room's quick tests that fails there, "time" if they take longer; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", QUICK]
    # Python tells code from its byte code by time and size, which a mutant need not change.
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    tests = subprocess.Popen([*command, f"tests/{room}"], cwd=folder, env=environ, **how)
    try:
        said, _ = tests.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)  # its ranks, too
        tests.wait()
        return "time"
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        failed[0].split(" - ")[0].split(" ", 1)[1]
        if failed
        else f"exit code {tests.returncode}"
        if tests.returncode
        else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--first", type=int, default=100, help="how many mutants to try (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.rooms) - ROOMS.keys():
        parser.error(f"there is no room {', '.join(unknown)}: there are {', '.join(ROOMS)}")
    mutants = []
    for room in options.rooms or ROOMS:
        for path in sorted((ROOT / ROOMS[room]).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            mutants += [(room, mutant) for mutant in mutants_of(file, path.read_bytes())]
    random.Random(SEED).shuffle(mutants)
    lived = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(WORKERS) as pool:
        copies: Queue[Path] = Queue()
        for number in range(WORKERS):
            copies.put(copy_of_the_repository(Path(scratch) / str(number)))
        chosen, usual = mutants[: options.first], {}
        for room in dict.fromkeys(room for room, _ in chosen):
            started = time.monotonic()
            if failed := what_fails(copies.queue[0], room, 3600):
                parser.error(f"the tests of {room} fail as it is: {failed}")
            usual[room] = time.monotonic() - started

        def attempt(room: str, mutant: Mutant) -> str:
            folder = copies.get()
            place = folder / mutant.file
            source = place.read_bytes()
            place.write_bytes(mutant.applied(source))
            try:
                return what_fails(folder, room, 15 + 4 * usual[room])
            finally:
                place.write_bytes(source)
                copies.put(folder)

        for (_, mutant), killer in zip(chosen, pool.map(attempt, *zip(*chosen, strict=True)), strict=True):
            lived += not killer
            fate = f"killed by {killer}" if killer else "LIVED"
            print(f"{mutant.file}:{mutant.line}: {mutant.before[:60]} -> {mutant.after[:60]}: {fate}", flush=True)
    print(f"{len(chosen) - lived} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
