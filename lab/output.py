# SPDX-License-Identifier: Apache-2.0
"""Write the records, tables and figures of experiments and benchmarks. Standard library only, except for figures."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradloc.record.files import write_whole


def write_json(path: Path, record: Any) -> None:
    """Replace a JSON file, whole or not at all; a number that is not finite becomes null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [finite(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    write_whole(path, json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False) + "\n")


def table(rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = (list(map(str, row)) for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


@contextlib.contextmanager
def figure(path: Path, width: float, num_plots: int, height: float = 4.2) -> Iterator[Any]:
    """Yield a figure and its plots, side by side; save them as a PNG on exit."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    yield made, made.subplots(1, num_plots)
    # Without metadata, two drawings of the same runs are the same bytes.
    made.savefig(path, dpi=100, metadata={"Software": None})
