# SPDX-License-Identifier: Apache-2.0
"""Tables with a frame around them, as rich, tabulate, Stable-Baselines and Markdown print them.

Either a table has a head and a row for each step, or it has a name and a value in each row, and is one step's.
"""

import re
from collections.abc import Iterable, Iterator

from ..errors import ReportError
from .names import STEPS, is_norm, number, numbers, step_of
from .recording import Recording
from .source import Source

_SIDES = "|│┃║"
_FRAME = re.compile(r"[\s|+=:\-\u2500-\u257f]+")
"""A line that is nothing but a frame."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LINES = 400
"""Of the head, in which a table has to begin."""


def is_boxed(source: Source) -> bool:
    """Whether the first lines hold a framed table with a gradient norm."""
    head = source.text_head.splitlines()[:_LINES]
    return any(any(map(is_norm, cells)) for rows in _tables(head) for cells in rows)


def read_boxes(source: Source) -> list[Recording]:
    """One run, from all framed tables of a file; lines between them are passed over.

    Raises:
        ReportError: where the tables of single steps are out of order, so that a row may have slipped into another.
    """
    found = [
        (_step_of(values), values, is_alone) for rows in _tables(source.lines()) for values, is_alone in _rows(rows)
    ]
    alone = [step for step, _, is_alone in found if is_alone and step is not None]
    num_back = sum(later < step for step, later in zip(alone, alone[1:], strict=False))
    if num_back > len(alone) / 10:
        raise ReportError(
            f"{source.name}: the steps of its tables go back {num_back} times, so a row may have slipped into another "
            "step's table: name the file that the trainer wrote."
        )
    made = Recording(source.name, "printed tables", notes=source.notes)
    with_step = [(step, values) for step, values, _ in found if step is not None]
    if with_step:
        made.rows += with_step
        return [made]
    norms = [values for _, values, _ in found if any(map(is_norm, values))]
    made.rows += enumerate(norms, 1)
    made.notes.append(f"The tables of {source.name} do not say their step: it was counted.")
    return [made]


def _tables(lines: Iterable[str]) -> Iterator[list[list[str]]]:
    """The cells of each table, row by row; a line outside of a frame ends it."""
    rows: list[list[str]] = []
    for line in lines:
        text = _COLOUR.sub("", line).strip()
        is_frame = bool(text) and _FRAME.fullmatch(text) is not None
        if len(text) > 2 and text[0] in _SIDES and text[-1] in _SIDES and not is_frame:
            rows.append([cell.strip() for cell in re.split(f"[{_SIDES}]", text[1:-1])])
        elif rows and (not is_frame or len(rows) > 1 and _is_one_steps(rows[0])):
            yield rows
            rows = []
    if rows:
        yield rows


def _rows(rows: list[list[str]]) -> Iterator[tuple[dict[str, float], bool]]:
    """The numbers of a table by their names, and whether each row has but one of them."""
    head = rows[0]
    if _is_one_steps(head):
        values: dict[str, str] = {}
        for name, value in (cells for cells in rows if len(cells) == 2):
            if name in values:  # the next step's, right below
                yield numbers(values), True
                values = {}
            values[name] = value
        yield numbers(values), True
        return
    for cells in rows[1:]:
        values = numbers(dict(zip(head, cells, strict=False)))
        if values:
            yield values, False


def _step_of(values: dict[str, float]) -> int | None:
    return step_of({_spelled(name): value for name, value in values.items()})


def _is_one_steps(head: list[str]) -> bool:
    """Whether a table's first row has a name and a value, and so is no head."""
    if len(head) != 2:
        return False
    is_head = any(map(is_norm, head)) or _spelled(head[0]) in STEPS
    return not is_head or number(head[1]) is not None


def _spelled(name: str) -> str:
    """A step's name in small letters; other names stay."""
    plain = re.sub(r"[\s.]+", "_", name.lower()).strip("_")
    plain = plain.removesuffix("s") if plain in ("steps", "iterations") else plain
    return plain if plain in STEPS else name
