# SPDX-License-Identifier: Apache-2.0
"""Read gradient analyses by reward-variance bucket from a run's folder, its logs or W&B.

An analysis is a dictionary of metrics under the guide's names (``grad_norm/<bucket>/...``) and, where it is known, the
table of the groups' reward deviations.
"""

import csv
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...record.files import read_bytes, read_json
from ..errors import ReportError
from ..logs import LoggedRun, read

TERMS = ("task", "entropy", "kl")
LOSSES = ("policy", "entropy", "kl", "total")
ALL = "all"
_NAME = re.compile(r"grad_norm/(bucket_\d{1,9}|all)/(.+)")
_COSINE = re.compile(r"grad_cosine/task/(bucket_\d{1,9})/(bucket_\d{1,9})")


@dataclass
class StepBuckets:
    """One step's analysis."""

    step: int
    values: dict[str, dict[str, float]]
    """Values by bucket (lowest variance first, ``all`` last) and by the rest of the metric's name."""
    cosines: dict[tuple[str, str], float] = field(default_factory=dict)
    """Cosine of two buckets' task gradients; both orders are there."""
    table: list[tuple[str, float]] = field(default_factory=list)
    """Bucket and reward deviation of each group; empty where the table could not be had."""

    @property
    def buckets(self) -> list[str]:
        """The variance buckets, without ``all``."""
        return [name for name in self.values if name != ALL]

    @property
    def terms(self) -> list[str]:
        """The loss' terms that were measured."""
        return [term for term in TERMS if any(term in values for values in self.values.values())]

    def get(self, bucket: str, name: str) -> float:
        """Return one metric; NaN when the run does not have it."""
        return self.values.get(bucket, {}).get(name, math.nan)


def from_metrics(step: int, row: Mapping[str, float | None]) -> StepBuckets | None:
    """Pick an analysis out of a step's metrics; None when no bucket was measured at this step."""
    values: dict[str, dict[str, float]] = {}
    cosines = {}
    for name, value in row.items():
        if value is None:
            continue
        measured, pair = _NAME.fullmatch(name), _COSINE.fullmatch(name)
        if measured and isinstance(value, int | float):
            bucket, rest = measured.groups()
            values.setdefault(bucket, {})[rest] = float(value)
        elif pair:
            left, right = pair.groups()
            cosines[left, right] = cosines[right, left] = float(value)
    buckets = sorted(values.keys() - {ALL}, key=lambda name: int(name.rpartition("_")[2]))
    if not buckets:
        return None
    return StepBuckets(step, {name: values[name] for name in [*buckets, ALL] if name in values}, cosines)


def read_analyses(path: Path, runs: Sequence[LoggedRun] | None = None) -> tuple[dict[int, StepBuckets], list[str]]:
    """Read the bucket analyses in a run's folder, see :func:`read_steps`; ``runs`` are its logs, if they were read."""

    def from_logs() -> dict[int, StepBuckets]:
        return _from_logs(path, read([path])[0] if runs is None else runs)

    return read_steps(path, "gradient", _from_record, from_logs)


def read_steps(
    path: Path, kind: str, parse: Callable[[dict], Any], from_logs: Callable[[], dict[int, Any]] = dict
) -> tuple[dict[int, Any], list[str]]:
    """Read the trainer's ``<kind>_analysis/step_<N>.json``.

    Args:
        path: the run's folder.
        kind: of the analysis.
        parse: a record -> its analysis; None where it has none.
        from_logs: called where there is no record: the analyses by step.

    Returns:
        The analyses in the order of their steps, and a sentence for each thing that could not be read.

    Raises:
        ReportError: when there is no analysis.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run.")
    analyses: dict[int, Any] = {}
    notes: list[str] = []
    for file in _files(path, f"{kind}_analysis", "step_*.json"):
        try:
            record = read_json(file, path)
            analysis = parse(record)
            if analysis is not None:
                analyses[int(record["global_step"])] = analysis
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            notes.append(f"{file.name} cannot be read ({error}) and was left out.")
    if not analyses:
        with suppress(ReportError):  # there may be no log
            analyses = from_logs()
    if not analyses:
        why = f" {notes[0]}" if notes else ""
        raise ReportError(
            f"{path} holds no {kind} analysis: none was due, or trainer.{kind}_analysis_mode (verl) was off.{why}"
        )
    return dict(sorted(analyses.items())), notes


def _from_record(record: dict) -> StepBuckets | None:
    # JSON has no number for NaN and infinities: the trainer writes "NaN" and "Infinity", which float() reads
    row = {name: float(value) for name, value in record["metrics"].items() if value is not None}
    analysis = from_metrics(int(record["global_step"]), row)
    if analysis is not None:
        analysis.table = [(group["bucket"], float(group["reward_std"])) for group in record["groups"]]
    return analysis


def _from_logs(path: Path, runs: Sequence[LoggedRun]) -> dict[int, StepBuckets]:
    """Read analyses from any logger's metrics, with tables from the trainer's CSV."""
    analyses: dict[int, StepBuckets] = {}
    for run in runs:
        series = {name: values for name, values in run.metrics.series.items() if name.startswith("grad_")}
        for index, step in enumerate(run.metrics.steps if series else ()):
            analysis = from_metrics(step, {name: values[index] for name, values in series.items()})
            if analysis is not None:
                analyses.setdefault(step, analysis)
    for file in _files(path, "gradient_analysis", "group_rv_table_step_*.csv"):
        with suppress(OSError, ValueError, csv.Error):
            analysis = analyses.get(int(file.stem.rpartition("_")[2]))
            if analysis is None:
                continue
            analysis.table = []
            for row in csv.DictReader(read_bytes(file, path).decode("utf-8", errors="replace").splitlines()):
                with suppress(KeyError, TypeError, ValueError):  # a line that does not parse is left out
                    analysis.table.append((row["bucket"], float(row["reward_std"])))
    return analyses


def _files(path: Path, folder: str, pattern: str) -> list[Path]:
    """Return the files in a run's folders of this name; ``path`` may be one itself."""
    folders = [path] if path.name == folder else sorted(path.rglob(folder))
    return [file for each in folders for file in sorted(each.glob(pattern))]


def to_json(analysis: StepBuckets) -> dict:
    """Return the content of ``gradient_analysis_metrics_step_<N>.json``."""

    def in_order(values: dict[str, float]) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}

    return {
        "step": analysis.step,
        "buckets": {bucket: in_order(values) for bucket, values in analysis.values.items()},
        "task_cosines": in_order({f"{a}/{b}": value for (a, b), value in analysis.cosines.items() if a < b}),
    }


def from_json(file: Path) -> StepBuckets:
    """Read a file that :func:`to_json` made; raise ReportError for any other."""
    try:
        data = read_json(file)
        row = {f"grad_cosine/task/{pair}": value for pair, value in data["task_cosines"].items()}
        for bucket, values in data["buckets"].items():
            row |= {f"grad_norm/{bucket}/{name}": value for name, value in values.items()}
        analysis = from_metrics(int(data["step"]), row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        analysis = None
    if analysis is None:
        raise ReportError(
            f"{file} is not a gradient_analysis_metrics file: make it with `gradloc buckets RUN_DIR --step N`."
        )
    return analysis


_TABLE = re.compile(r"grad_norm/(bucket_\d{1,9})/group_rv_table")


def read_wandb(
    path: str, steps: list[int] | None = None, api: Any = None
) -> tuple[dict[int, StepBuckets], list[str], str]:
    """Read the analyses of a run in W&B.

    Args:
        path: ENTITY/PROJECT/RUN_ID.
        steps: those whose tables are read; None: all.
        api: in place of ``wandb.Api()``.

    Returns:
        Analyses by step, notes, and the name of a folder for them, ``<run name>_<run id>``.
    """
    if len(path.strip("/").split("/")) != 3:
        raise ReportError(f"--wandb-path {path} must be ENTITY/PROJECT/RUN_ID.")
    try:
        if api is None:
            import wandb

            api = wandb.Api()
        run = api.run(path.strip("/"))
        rows = list(run.scan_history())
    except ImportError:
        missing = "reading from W&B needs its package: pip install wandb, or name the run's folder."
        raise ReportError(missing) from None
    except Exception as error:  # the package's own errors have no common base
        raise ReportError(f"W&B has no run {path} that can be read here: {error}") from None
    analyses: dict[int, StepBuckets] = {}
    notes: list[str] = []
    for row in rows:
        step = row.get("training/global_step", row.get("_step"))
        analysis = None if step is None else from_metrics(int(step), row)
        if analysis is None:
            continue
        analyses[analysis.step] = analysis
        if steps is None or analysis.step in steps:
            analysis.table, problem = _table(run, row)
            if problem:
                notes.append(f"step {analysis.step}: {problem}; mean and range are drawn.")
    if not analyses:
        raise ReportError(
            f"the run {path} has no grad_norm/bucket_* metric: trainer.gradient_analysis_mode was "
            "off, or no analysed step was logged."
        )
    return dict(sorted(analyses.items())), notes, re.sub(r"[^\w.-]+", "-", f"{run.name}_{run.id}")


def _table(run: Any, row: dict) -> tuple[list[tuple[str, float]], str]:
    """Read the table of one step's groups; where it is missing, the second value says why."""
    table: list[tuple[str, float]] = []
    for key, reference in row.items():
        if not _TABLE.fullmatch(key) or not isinstance(reference, dict):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = run.file(reference["path"]).download(root=folder, replace=True)
                data = read_json(Path(file.name))
            bucket, deviation = (data["columns"].index(name) for name in ("bucket", "reward_std"))
            table += [(line[bucket], float(line[deviation])) for line in data["data"]]
        except Exception as error:  # without the table there are still mean and range
            return [], f"its group_rv_table cannot be had ({error})"
    return table, "" if table else "it has no group_rv_table"
