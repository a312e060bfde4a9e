# SPDX-License-Identifier: Apache-2.0
"""Quartile analyses as read from a run's folder: ``quartile_analysis/step_<N>.json``."""

import json
from pathlib import Path

import msgspec

from ..errors import ReportError
from ..runs.records import convert
from .buckets import files

FOLDER = "quartile_analysis"
NUM_QUARTILES = 4
NOTICEABLE = 0.05
SPLITS = {
    "quantile": "four parts of equally many tokens",
    "range": "quarters of the probabilities",
}


class Range(msgspec.Struct):
    """The probabilities of a quartile's tokens."""

    min: float
    mean: float
    max: float


class Quartile(msgspec.Struct):
    """One quartile; see docs/quartiles.md for what each number means. None: it has no tokens."""

    name: str
    num_tokens: int
    norm: float
    token_share: float | None = None
    probability: Range | None = None
    one_minus_probability: float | None = None
    norm_per_token: float | None = None
    gradient_share: float | None = None
    sampled: int = 0
    mean_log_prob_norm: float | None = None
    median_log_prob_norm: float | None = None
    mean_loss_norm: float | None = None


class Token(msgspec.Struct):
    """One sampled token's own gradient."""

    quartile: int
    probability: float
    log_prob_norm: float
    loss_norm: float


class Agreement(msgspec.Struct):
    """How much an update's probability changes look like those of the update of all tokens."""

    correlation: float | None = None
    ratio: float | None = None


class Change(msgspec.Struct):
    """How a quartile's tokens moved."""

    mean: float
    mean_abs: float
    percentiles: list[float]
    """At 0, 5, 25, 50, 75, 95 and 100 percent."""
    counts: list[int]
    right_way: float | None = None


class Moved(msgspec.Struct):
    """How all tokens moved in one update; None for a quartile without tokens."""

    edges: list[float]
    quartiles: list[Change | None]
    agreement: Agreement | None = None


class Update(msgspec.Struct):
    """One tried update; no ``changes`` where no step was taken."""

    is_taken: bool
    grad_norm: float
    clip_factor: float
    update_norm: float
    changes: Moved | None = None
    own_changes: Moved | None = None
    """Without what the optimizer does of itself."""


class Whole(msgspec.Struct):
    """The whole gradient."""

    norm: float
    num_tokens: int


class Optimizer(msgspec.Struct):
    """What took the steps."""

    name: str
    learning_rate: float


class Correlations(msgspec.Struct):
    """Rank correlations of 1 - pi with the sampled tokens' gradient norms."""

    log_prob_norm: float | None = None
    loss_norm: float | None = None


class Analysis(msgspec.Struct):
    """One analysed step."""

    global_step: int
    split: str
    whole: Whole
    quartiles: list[Quartile]
    tokens: list[Token]
    updates: dict[str, Update | None]
    rank_correlation: Correlations
    optimizer: Optimizer
    closure: float | None = None

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
            analysis = convert(read_json(file), Analysis)
            if len(analysis.quartiles) != NUM_QUARTILES:
                raise ValueError(f"{len(analysis.quartiles)} quartiles")
        except (ValueError, msgspec.ValidationError) as error:
            notes.append(f"{file.name} cannot be read ({error}) and was left out.")
            continue
        found[analysis.global_step] = analysis
    if not found:
        why = f" {notes[0]}" if notes else ""
        raise ReportError(
            f"{path} holds no quartile analysis: none was due, or trainer.quartile_analysis_mode was off.{why}"
        )
    return dict(sorted(found.items())), notes


def read_json(file: Path) -> dict:
    """A record, with the numbers that JSON has no number for."""
    return _numbers(json.loads(file.read_text(encoding="utf-8")))


def _numbers(value):
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
