# SPDX-License-Identifier: Apache-2.0
"""MLflow's folder of files, and the SQLite files of MLflow and trackio."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from .names import number, numbers
from .recording import Recording, flat, gather
from .source import Source


def is_database(source: Source) -> bool:
    return source.head.startswith(b"SQLite format 3\0")


def read_database(source: Source) -> list[Recording]:
    """Every run in an MLflow or trackio database."""
    where = source.path.resolve().as_uri()
    for mode in ("ro", "ro&immutable=1"):  # the second where the folder cannot be written: a journal needs that
        try:
            with closing(sqlite3.connect(f"{where}?mode={mode}", uri=True)) as database:
                columns = [row[1] for row in database.execute("pragma table_info(metrics)")]
                if "metrics" in columns:
                    return list(_trackio(source, database, columns))
                return list(_mlflow(source, database)) if "run_uuid" in columns else []
        except (sqlite3.Error, UnicodeDecodeError) as error:
            notes = [f"{source.name} is damaged ({error})."]
    source.notes += notes
    return []


def _trackio(source: Source, database: sqlite3.Connection, columns: list[str]) -> Iterator[Recording]:
    which = "run_id" if "run_id" in columns else "run_name"
    runs: dict[str, Recording] = {}
    for key, name, step, text in database.execute(f"select {which}, run_name, step, metrics from metrics order by id"):
        found = runs.setdefault(key, Recording(source.name, "trackio", str(name)))
        try:
            values = numbers(json.loads(text))
        except (ValueError, TypeError, AttributeError):
            found.notes = [f"{source.name} has rows that cannot be read; they were left out."]
            continue
        if isinstance(step, int) and values:
            found.rows.append((step, values))
    if runs and database.execute("select count(*) from sqlite_master where name = 'configs'").fetchone()[0]:
        for key, text in database.execute(f"select {which}, config from configs"):
            if key in runs:
                said = json.loads(text)
                runs[key].config = {name: value for name, value in flat(said).items() if not name.startswith("_")}
    yield from runs.values()


def _mlflow(source: Source, database: sqlite3.Connection) -> Iterator[Recording]:
    names = dict(database.execute("select run_uuid, name from runs"))
    for run, name in names.items():
        values = database.execute(
            "select step, key, value, is_nan from metrics where run_uuid = ? order by timestamp, step", (run,)
        )
        triples = [
            (int(step), str(key), float("nan") if is_nan else float(value)) for step, key, value, is_nan in values
        ]
        config = dict(database.execute("select key, value from params where run_uuid = ?", (run,)))
        if triples:
            yield Recording(source.name, "MLflow", name or run, "", gather(triples), _dotted(config))


def is_mlflow_run(folder: Path) -> bool:
    """Whether a folder is one run of MLflow's file store."""
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def read_mlflow_run(folder: Path) -> Recording:
    """A run of MLflow's file store: a file for each metric, ``time value step`` on each line."""
    values, notes = [], []
    for file in sorted((folder / "metrics").rglob("*")):
        if not file.is_file():
            continue
        name, num_bad = file.relative_to(folder / "metrics").as_posix(), 0
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            said = [number(part) for part in line.split()]
            if len(said) >= 3 and None not in said[:3] and all(abs(said[at]) < 2**53 for at in (0, 2)):
                values.append((said[0], int(said[2]), name, said[1]))
            else:
                num_bad += bool(line.strip())
        if num_bad:
            notes.append(f"{num_bad} lines of {name} cannot be read and were left out.")
    values.sort(key=lambda entry: entry[:2])
    params = {
        file.relative_to(folder / "params").as_posix(): file.read_text(encoding="utf-8", errors="replace").strip()
        for file in sorted((folder / "params").rglob("*"))
        if file.is_file()
    }
    name = folder / "tags" / "mlflow.runName"
    run = name.read_text(encoding="utf-8", errors="replace").strip() if name.is_file() else ""
    rows = gather((step, metric, value) for _, step, metric, value in values)
    return Recording(folder.name, "MLflow", run, "", rows, _dotted(params), notes)


def _dotted(params: dict[str, str]) -> dict[str, str]:
    """verl logs its settings to MLflow by names with slashes."""
    return {name.replace("/", "."): value for name, value in params.items()}
