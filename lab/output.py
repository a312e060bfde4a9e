# SPDX-License-Identifier: Apache-2.0
"""Write the records and tables that experiments and benchmarks leave. Standard library only."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path, record: Any) -> None:
    """Replace a JSON file atomically; a number that is not finite becomes null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [finite(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    part = path.with_name(f"{path.name}.part")
    text = json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def table(rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = (list(map(str, row)) for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
