# SPDX-License-Identifier: Apache-2.0
"""Make mutants: one expression or statement of a module is replaced by another."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
DELETED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """A replacement of the source between two byte offsets of a file."""

    file: str
    where: str
    """Enclosing function or class; "" for the module."""
    line: int
    last: int
    span: tuple[int, int]
    before: str
    after: str
    is_import: bool = False
    """Whether it is executed on import."""
    nth: int = 0
    """Index among equal replacements in one function."""

    @property
    def name(self) -> str:
        """Name without the line, so that it does not depend on other code."""
        return "|".join((self.file, self.where, self.before, self.after, str(self.nth)))

    def rank(self, seed: int) -> str:
        """Reproducible pseudo-random sort key for the sample."""
        return hashlib.sha256(f"{seed}|{self.name}".encode()).hexdigest()

    def applied(self, source: bytes) -> bytes:
        """Return the module's source with the change."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]

    def is_code(self, source: bytes) -> bool:
        """Return whether the module is still valid Python."""
        try:
            ast.parse(self.applied(source))
        except SyntaxError:
            return False
        return True


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a module, in the order of its text.

    Not changed: annotations, decorators, asserts, zip's `strict=`, text, and f-strings, whose offsets Python 3.11
    misreports.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, ...]] = Counter()

    def add(node: Any, after: str, where: str, is_import: bool) -> None:
        span = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
        before = " ".join(ast.unparse(node).split())
        key = (where, before, after)
        found.append(Mutant(file, where, node.lineno, node.end_lineno, span, before, after, is_import, seen[key]))
        seen[key] += 1

    def walk(node: ast.AST, where: str, is_import: bool) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert):
            return
        if hasattr(node, "lineno"):
            for after in _others(node):
                add(node, after, where, is_import)
        for test in _conditions(node):
            add(test, f"(not ({ast.unparse(test)}))", where, is_import)
        left_out, is_function = _left_out(node), isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
        for child in ast.iter_child_nodes(node):
            if child not in left_out:
                walk(child, where, is_import and (not is_function or isinstance(child, ast.arguments)))

    walk(ast.parse(source), "", True)
    return found


def _others(node: ast.AST) -> Iterator[str]:
    """Return the replacements of a node."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], SWAPS[type(op)](), *node.ops[index + 1 :]]
                yield f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
        case ast.BoolOp():
            yield f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
        case ast.BinOp() if type(node.op) in SWAPS and not any(map(_is_text, (node.left, node.right))):
            yield f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield str(not node.value)
        case ast.Constant(value=int()):
            yield str(node.value + 1)
        case ast.Constant(value=float()):
            yield repr(2 * node.value or 1.0)
        case ast.Name(ctx=ast.Load(), id=name) | ast.Attribute(ctx=ast.Load(), attr=name) if name in NAMES:
            yield ast.unparse(node)[: -len(name)] + NAMES[name]
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.stmt() if isinstance(node, DELETED) and not _is_docstring(node):
            yield "pass"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Return the conditions to negate: neither comparisons nor boolean operations, which have their own changes."""
    found = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
    return [test for test in found if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr)]


def _left_out(node: ast.AST) -> list[ast.AST | None]:
    match node:
        case ast.FunctionDef():
            return [*node.decorator_list, node.returns]
        case ast.ClassDef():
            return list(node.decorator_list)
        case ast.arg() | ast.AnnAssign():
            return [node.annotation]
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return [node.value]
    return []
