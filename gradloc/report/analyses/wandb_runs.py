# SPDX-License-Identifier: Apache-2.0
"""Gradient analyses of a run that Weights & Biases keeps; the only file that needs a network."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ..errors import ReportError
from .buckets import StepBuckets, from_metrics

_TABLE = re.compile(r"grad_norm/(bucket_\d+)/group_rv_table")


def read_wandb(
    path: str, steps: list[int] | None = None, api: Any = None
) -> tuple[dict[int, StepBuckets], list[str], str]:
    """The analyses of ENTITY/PROJECT/RUN_ID by step, notes, and a folder name: ``<run name>_<run id>``.

    Only the tables of ``steps`` are read, where these are given; ``api`` stands in for ``wandb.Api()``.
    """
    if len(path.strip("/").split("/")) != 3:
        raise ReportError(f"--wandb-path {path} must be ENTITY/PROJECT/RUN_ID.")
    try:
        run = (api or _wandb().Api()).run(path.strip("/"))
        rows = list(run.scan_history())
    except ReportError:
        raise
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


def _wandb():
    try:
        import wandb
    except ImportError:
        raise ReportError("reading from W&B needs its package: pip install wandb, or name the run's folder.") from None
    return wandb


def _table(run: Any, row: dict) -> tuple[list[tuple[str, float]], str]:
    """The groups of one step, and why their table could not be had."""
    table: list[tuple[str, float]] = []
    for key, reference in row.items():
        if not _TABLE.fullmatch(key) or not isinstance(reference, dict):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = run.file(reference["path"]).download(root=folder, replace=True)
                data = json.loads(Path(file.name).read_text(encoding="utf-8"))
            bucket, deviation = (data["columns"].index(name) for name in ("bucket", "reward_std"))
            table += [(line[bucket], float(line[deviation])) for line in data["data"]]
        except Exception as error:  # without the table there are still mean and range
            return [], f"its group_rv_table cannot be had ({error})"
    return table, "" if table else "it has no group_rv_table"
