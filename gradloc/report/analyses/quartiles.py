# SPDX-License-Identifier: Apache-2.0
"""Quartile analyses as read from a run's folder: ``quartile_analysis/step_<N>.json``."""

import json
from pathlib import Path

from ...record.analysis import QUARTILES, QuartileAnalysis, Update
from ...record.reading import read
from ..errors import ReportError
from .buckets import files

FOLDER = "quartile_analysis"
NOTICEABLE = 0.05
SPLITS = {
    "quantile": "four parts of equally many tokens",
    "range": "quarters of the probabilities",
}


class Analysis(QuartileAnalysis):
    """One analysed step."""

    def update(self, name: str) -> Update | None:
        """A tried update; None where there was none."""
        return self.updates.get(name)

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer moves the weights noticeably without any gradient."""
        none, whole = self.update("none"), self.update("all")
        if none is None or whole is None:
            return False
        return none.update_norm > NOTICEABLE * whole.update_norm


def read_quartiles(path: Path) -> tuple[dict[int, Analysis], list[str]]:
    """Read a run's quartile analyses, by step.

    Args:
        path: the run's folder, or any folder that holds ``quartile_analysis/``.

    Returns:
        The analyses, and a sentence for each file that could not be read.

    Raises:
        ReportError: when there is none.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run.")
    found: dict[int, Analysis] = {}
    notes: list[str] = []
    for file in files(path, FOLDER, "step_*.json"):
        try:
            analysis = read(Analysis, json.loads(file.read_text(encoding="utf-8")))
            if len(analysis.quartiles) != len(QUARTILES):
                raise ValueError(f"{len(analysis.quartiles)} quartiles")
        except ValueError as error:
            notes.append(f"{file.name} cannot be read ({error}) and was left out.")
            continue
        found[analysis.global_step] = analysis
    if not found:
        why = f" {notes[0]}" if notes else ""
        raise ReportError(
            f"{path} holds no quartile analysis: none was due, or trainer.quartile_analysis_mode was off.{why}"
        )
    return dict(sorted(found.items())), notes
