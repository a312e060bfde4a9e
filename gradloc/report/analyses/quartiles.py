# SPDX-License-Identifier: Apache-2.0
"""Quartile analyses as read from a run's folder: ``quartile_analysis/step_<N>.json``."""

from pathlib import Path

from ...record.analysis import QUARTILES, QuartileAnalysis
from ...record.reading import read
from .buckets import Found, read_steps

FOLDER = "quartile_analysis"
NOTICEABLE = 0.05
SPLITS = {"quantile": "four parts of equally many tokens", "range": "quarters of the probabilities"}


class Analysis(QuartileAnalysis):
    """One analysed step."""

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer moves the weights noticeably without any gradient."""
        none, whole = self.updates.get("none"), self.updates.get("all")
        if none is None or whole is None:
            return False
        return none.update_norm > NOTICEABLE * whole.update_norm


def read_quartiles(path: Path) -> Found:
    """Read a run's quartile analyses, by step.

    Args:
        path: the run's folder, or any folder that holds ``quartile_analysis/``.

    Returns:
        The analyses, and a sentence for each file that could not be read.

    Raises:
        ReportError: when there is none.
    """
    return read_steps(path, FOLDER, "quartile", _from_record)


def _from_record(record: dict) -> tuple[int, Analysis]:
    analysis = read(Analysis, record)
    if len(analysis.quartiles) != len(QUARTILES):
        raise ValueError(f"{len(analysis.quartiles)} quartiles")
    return analysis.global_step, analysis
