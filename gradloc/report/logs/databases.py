# SPDX-License-Identifier: Apache-2.0
"""MLflow's folder of files, and the SQLite files of MLflow and trackio."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from .names import number, numbers, step_of
from .recording import Recording, flat, gather
from .source import Source


def read_database(source: Source) -> list[Recording]:
    """Every run in an MLflow or trackio database."""
    where = source.path.resolve().as_uri()
    for mode in ("ro", "ro&immutable=1"):  # the second where the folder cannot be written: a journal needs that
        try:
            with closing(sqlite3.connect(f"{where}?mode={mode}", uri=True)) as database:
                columns = [row[1] for row in database.execute("pragma table_info(metrics)")]
                if "metrics" in columns:
                    return _read_trackio(source, database, columns)
                return list(_read_mlflow(source, database)) if "run_uuid" in columns else []
        except (sqlite3.Error, UnicodeDecodeError) as error:
            problem = error
    source.notes.append(f"{source.name} is damaged ({problem}).")
    return []


def _read_trackio(source: Source, database: sqlite3.Connection, columns: list[str]) -> list[Recording]:
    which = "run_id" if "run_id" in columns else "run_name"
    runs: dict[str, Recording] = {}
    for key, name, step, text in database.execute(f"select {which}, run_name, step, metrics from metrics order by id"):
        run = runs.setdefault(key, Recording(source.name, "trackio", str(name)))
        try:
            values = numbers(json.loads(text))
        except (ValueError, TypeError, AttributeError):
            run.notes = [f"{source.name} has rows that cannot be read; they were left out."]
            continue
        if isinstance(step, int) and values:
            run.rows.append((step, values))
    if runs and database.execute("select count(*) from sqlite_master where name = 'configs'").fetchone()[0]:
        for key, text in database.execute(f"select {which}, config from configs"):
            if key in runs:
                settings = flat(json.loads(text))
                runs[key].config = {name: value for name, value in settings.items() if not name.startswith("_")}
    return list(runs.values())


def _read_mlflow(source: Source, database: sqlite3.Connection) -> Iterator[Recording]:
    for run, name in database.execute("select run_uuid, name from runs").fetchall():
        values = database.execute(
            "select step, key, value, is_nan from metrics where run_uuid = ? order by timestamp, step", (run,)
        )
        triples = ((int(step), str(key), float("nan" if is_nan else value)) for step, key, value, is_nan in values)
        config = dict(database.execute("select key, value from params where run_uuid = ?", (run,)))
        yield Recording(source.name, "MLflow", name or run, "", gather(triples), _dotted(config))


def is_mlflow_run(folder: Path) -> bool:
    """Whether a folder is a run of MLflow's file store, or that run's ``metrics``, copied without the rest."""
    if folder.name != "metrics":
        return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()
    first = next((file for file in sorted(folder.rglob("*")) if file.is_file()), None)
    if first is None:
        return False
    with first.open(encoding="utf-8", errors="replace") as lines:
        return re.fullmatch(r"\d{12,} \S+ \d+\s*", next(lines, "")) is not None


def read_mlflow_run(folder: Path) -> Recording:
    """A run of MLflow's file store: a file for each metric, ``time value step`` on each line."""
    values, notes = [], []
    metrics = folder if folder.name == "metrics" else folder / "metrics"
    for name, text in _files(metrics).items():
        num_bad = 0
        for line in filter(str.strip, text.splitlines()):
            time, value, step = (*map(number, line.split()), None, None, None)[:3]
            known = step_of({"step": step})
            if time is None or abs(time) >= 2**53 or value is None or known is None:
                num_bad += 1
            else:
                values.append((time, known, name, value))
        if num_bad:
            notes.append(f"{num_bad} lines of {name} cannot be read and were left out.")
    values.sort(key=lambda entry: entry[:2])
    rows = gather((step, metric, value) for _, step, metric, value in values)
    params = {name: text.strip() for name, text in _files(metrics.parent / "params").items()}
    run = _files(metrics.parent / "tags").get("mlflow.runName", "").strip()
    return Recording(folder.name, "MLflow", run, "", rows, _dotted(params), notes)


def _files(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8", errors="replace")
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _dotted(params: dict[str, str]) -> dict[str, str]:
    """verl logs its settings to MLflow by names with slashes."""
    return {name.replace("/", "."): value for name, value in params.items()}
