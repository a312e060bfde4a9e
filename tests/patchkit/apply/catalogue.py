# SPDX-License-Identifier: Apache-2.0
"""Every refusal of patchkit, read from its source: what is said is written where it is raised.

``REFUSALS`` holds (reason, what, cause, next) with THING in place of each value. A part that is a name is looked up
among the assignments before it in the same function, then among the module's and those of ``patchkit.errors``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from patchkit import errors

ROOT = Path(__file__).resolve().parents[3] / "patchkit"
PARTS = ("reason", "what", "cause", "next_")


def text_of(node: ast.expr, names: dict[str, ast.expr]) -> list[str]:
    """Returns the texts that an expression may be; none where it cannot be told."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return ["".join(v.value if isinstance(v, ast.Constant) else "THING" for v in values)]
        case ast.IfExp(body=body, orelse=orelse):
            return text_of(body, names) + text_of(orelse, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in text_of(left, names) for b in text_of(right, names)]
        case ast.Name(id=name) if name in names:
            return text_of(names[name], {key: value for key, value in names.items() if key != name})
        case ast.Name(id=name) if isinstance(getattr(errors, name, None), str):
            return [getattr(errors, name)]
    return []


def assignments(body: ast.AST) -> Iterator[tuple[int, str, ast.expr]]:
    for node in ast.walk(body):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            yield from ((node.lineno, name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def refusals() -> Iterator[tuple[str, ...]]:
    for path in sorted(ROOT.rglob("*.py")):
        module = ast.parse(path.read_text())
        shared = {name: value for _, name, value in assignments(ast.Module(module.body, []))}
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            local = list(assignments(function))
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if not (name.endswith("Error") or name == "refusal") or len(call.args) < 2:
                    continue
                names = dict(shared)
                names |= {key: value for line, key, value in local if line <= call.lineno}
                parts = [text_of(arg, names) for arg in call.args[:4]]
                defaults = [[], [], [errors.NOT_OURS], [errors.BUILT]]
                parts += defaults[len(parts) :]
                for reason in parts[0]:
                    yield (reason, *(" / ".join(part) for part in parts[1:]))
        # Tables of refusals, and chains that assign one after the other.
        for node in ast.walk(module):
            if isinstance(node, ast.Tuple) and len(node.elts) == 4 and isinstance(node.elts[1], ast.Constant):
                reason, *said = (text_of(element, shared) for element in node.elts[1:])
                if reason and "-" in reason[0] and all(said):
                    yield (reason[0], said[0][0], said[1][0], errors.GET_AGAIN)
            if isinstance(node, ast.If):
                named = {name: value for _, name, value in assignments(ast.Module(node.body, []))}
                found = {
                    name: text_of(value, {other: named[other] for other in named if other != name})
                    for name, value in named.items()
                }
                if {"reason", "what"} <= found.keys() and found["reason"]:
                    yield tuple(" / ".join(found.get(part, [])) for part in PARTS)


REFUSALS = sorted({refusal[0]: refusal for refusal in refusals()}.values())
