# SPDX-License-Identifier: Apache-2.0
"""Quartile analyses as read from a run's folder: ``quartile_analysis/step_<N>.json``."""

from pathlib import Path

from ...record.analysis import QUARTILES, QuartileAnalysis
from ...record.reading import read
from .buckets import Found, read_steps, required

SPLITS = {"quantile": "four parts of equally many tokens", "range": "quarters of the probabilities"}


def read_quartiles(path: Path) -> Found:
    """The analyses in a run's folder, by step; raises ReportError when there is none."""
    analyses, notes = read_steps(path, "quartile_analysis", _from_record)
    return required(analyses, notes, path, "quartile")


def _from_record(record: dict) -> QuartileAnalysis:
    analysis = read(QuartileAnalysis, record)
    if len(analysis.quartiles) != len(QUARTILES):
        raise ValueError(f"{len(analysis.quartiles)} quartiles")
    return analysis
