# SPDX-License-Identifier: Apache-2.0
"""Quartile analyses as read from a run's folder: ``quartile_analysis/step_<N>.json``."""

from pathlib import Path

from ...record.analysis import QUARTILES, QuartileAnalysis
from ...record.reading import read
from .buckets import Found, read_steps, required

SPLITS = {"quantile": "four parts of equally many tokens", "range": "quarters of the probabilities"}


class Analysis(QuartileAnalysis):
    """One analysed step."""

    @property
    def has_momentum(self) -> bool:
        """Whether without any gradient the optimizer would still move the weights by over 5 % of its step."""
        none, whole = self.updates.get("none"), self.updates.get("all")
        return none is not None and whole is not None and none.update_norm > 0.05 * whole.update_norm


def read_quartiles(path: Path) -> Found:
    """The analyses in a run's folder, by step; raises ReportError when there is none."""
    analyses, notes = read_steps(path, "quartile_analysis", _from_record)
    return required(analyses, notes, path, "quartile")


def _from_record(record: dict) -> Analysis:
    analysis = read(Analysis, record)
    if len(analysis.quartiles) != len(QUARTILES):
        raise ValueError(f"{len(analysis.quartiles)} quartiles")
    return analysis
