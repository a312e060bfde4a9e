# SPDX-License-Identifier: Apache-2.0
"""Tables that are no text: parquet and spreadsheets, read by the packages of ``pip install '.[logs]'``."""

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ReportError
from .recording import Recording
from .source import Source
from .tables import read_columns

_PACKAGES = {"pyarrow.parquet": "parquet", "openpyxl": "a spreadsheet"}


def is_parquet(source: Source) -> bool:
    return source.head.startswith(b"PAR1")


def read_parquet(source: Source) -> list[Recording]:
    """The runs of a parquet file, some rows at a time."""
    with _refusing(source, "pyarrow.parquet").ParquetFile(source.path) as file:
        rows = (row.values() for batch in file.iter_batches() for row in batch.to_pylist())
        return read_columns(source, file.schema_arrow.names, _texts(rows))


def read_spreadsheet(source: Source) -> list[Recording]:
    """The runs of every sheet with a step and numbers; their values, not their formulas."""
    made, refusal = [], None
    with source.path.open("rb") as file:  # by its path, openpyxl wants the ending .xlsx
        book = _refusing(source, "openpyxl").load_workbook(file, read_only=True, data_only=True)
        for sheet in book.worksheets:
            rows = _texts(sheet.iter_rows(values_only=True))
            try:
                made += read_columns(source, next(rows, []), rows)
            except ReportError as error:  # notes of one's own beside the run
                refusal = refusal or error
    if refusal and not any(recording.rows for recording in made):
        raise refusal
    return made


def _texts(rows: Iterable[Iterable[Any]]) -> Iterator[list[str]]:
    for row in rows:
        yield ["" if value is None else str(value) for value in row]


def _refusing(source: Source, package: str) -> Any:
    """The package; raises ReportError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ReportError(
            f"{source.name} is {_PACKAGES[package]}, which needs {name} to be read: pip install {name}, or save it as "
            "a CSV and name that."
        ) from None
