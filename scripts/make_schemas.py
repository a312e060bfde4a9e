#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the JSON Schemas in schema/ from the dataclasses that are written, and the table of columns in docs/bundle.md:
``python scripts/make_schemas.py``.

A class is a ``$defs`` entry, a field's docstring its description. Every field is required unless it says
``optional()``; null is allowed where the type says None, unless the field says ``never_null()``.
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gradloc.record import BY_COLUMN, Event, analysis, bundle  # noqa: E402
from gradloc.record.columns import COLUMNS, STORED, Column  # noqa: E402
from lab.output import table  # noqa: E402

FILES = {
    "event": Event,
    "sequences": bundle.SequenceFile,
    "bundle": bundle.BundleMeta,
    "gradient_analysis": analysis.GradientAnalysis,
    "quartile_analysis": analysis.QuartileAnalysis,
}
PLAIN = {str: "string", int: "integer", bool: "boolean", types.NoneType: "null"}
NUMBER = {
    "description": "A number; what JSON has no number for is spelled out.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON Schema of a file with one object of this dataclass."""
    maker = _Maker()
    body = maker.object(kind)
    defs = {"number": NUMBER, **dict(sorted(maker.defs.items()))}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "$defs": defs}


def text_of(schema: dict[str, Any]) -> str:
    """Return the text to commit."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


_PLACE = re.compile(r"(<!-- made by python scripts/make_schemas.py -->\n).*?(?=<!-- end -->)", re.S)


def page() -> tuple[Path, str]:
    """Return docs/bundle.md with its table of columns made anew."""
    path = ROOT / "docs" / "bundle.md"
    head = "column", "on the page", "meaning", "unit", "from"
    rows = [(f"`{name}`", column.label, column.means, column.unit, _source(column)) for name, column in COLUMNS.items()]
    return path, _PLACE.sub(lambda place: f"{place[1]}{table([head, *rows])}\n", path.read_text(encoding="utf-8"))


def _source(column: Column) -> str:
    """Say where a column's values come from."""
    if column.minus is None:
        return f"the batch's `{column.tensor}`" if column.tensor else "the search"
    difference = "`{}` - `{}`".format(*column.minus)
    return f"exp({difference})" if column.is_ratio else difference


class _Maker:
    """Translate types to schemas; collect classes in ``defs``."""

    def __init__(self):
        self.defs: dict[str, Any] = {}

    def object(self, kind: type) -> dict[str, Any]:
        hints, described = typing.get_type_hints(kind, include_extras=True), descriptions(kind)
        fields = dataclasses.fields(kind)
        properties = {}
        for field in fields:
            says = {"description": described[field.name]} if field.name in described else {}
            properties[field.name] = {**says, **self.value(hints[field.name], field.metadata.get("null", True))}
        return {
            "description": _one_line(kind.__doc__),
            "type": "object",
            "properties": properties,
            "required": [field.name for field in fields if field.metadata.get("required", True)],
            "additionalProperties": False,
        }

    def value(self, hint: Any, may_be_null: bool = True) -> dict[str, Any]:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            says = dict(args[1:])
            if BY_COLUMN in args:
                value = self.value(typing.get_args(args[0])[1])
                says = {"properties": {name: {"description": _of(column), **value} for name, column in STORED.items()}}
                return {"type": "object", **says, "additionalProperties": False}
            return says if "type" in says else {**self.value(args[0]), **says}
        if origin in (typing.Union, types.UnionType):
            kinds = [self.value(arg) for arg in args if may_be_null or arg is not types.NoneType]
            return {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
        if origin is tuple and args[-1] is not ...:
            return {"type": "array", "prefixItems": [self.value(arg) for arg in args], "items": False,
                    "minItems": len(args)}  # fmt: skip
        if origin is tuple:
            return {"type": "array", "items": self.value(args[0])}
        if origin is dict:
            values = {} if args[1] is Any else {"additionalProperties": self.value(args[1])}
            return {"type": "object", **values}
        if dataclasses.is_dataclass(hint):
            if hint.__name__ not in self.defs:
                self.defs[hint.__name__] = {}  # before its fields, which may refer to it
                self.defs[hint.__name__] = self.object(hint)
            return {"$ref": f"#/$defs/{hint.__name__}"}
        if hint is float:
            return {"$ref": "#/$defs/number"}
        return {"type": PLAIN[hint]}


def _of(column: Column) -> str:
    return f"{column.means} Unit: {column.unit}." if column.unit else column.means


def descriptions(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, by field; of its base classes as well."""
    found = {}
    for base in kind.__bases__:
        found |= {} if base is object else descriptions(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for field, below in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = _one_line(below.value.value)
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    """Write the files."""
    for name, kind in FILES.items():
        path = ROOT / "schema" / f"{name}.v{kind.schema_version}.schema.json"
        path.write_text(text_of(schema_of(kind)), encoding="utf-8")
    path, text = page()
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
