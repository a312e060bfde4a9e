# SPDX-License-Identifier: Apache-2.0
"""The columns of the table of tokens, listed here and nowhere else. Standard library only.

An event's table has a row for each token of the sequences that hold its culprits. The search fills the columns of the
gradient, the trainer's batch those that name a tensor; a column that reads others is computed when it is asked for.
Schemas, CSV, page, Markdown and the replay bundle go through :data:`COLUMNS`. CONTRIBUTING.md says what else a new
column needs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

ACTOR, CRITIC, DISTILLED = "actor", "critic", "distilled"
"""Kinds of losses; ``distilled`` is a policy's loss of distillation alone."""


@dataclass(frozen=True)
class Shade:
    """Shading of tokens by a column on a page."""

    means: str
    least: float
    """Least value of the full shade, so that noise does not get full colour."""
    is_diverging: bool = True
    """Whether it has two signs."""


@dataclass(frozen=True)
class Column:
    """A number of each token, a float32."""

    label: str
    """Label on the page; empty for a column that is not shown."""
    means: str
    """A sentence for the schema."""
    unit: str = ""
    tensor: str = ""
    """Name of the tensor (R, T) in the trainer's batch; empty where the search fills the column."""
    losses: tuple[str, ...] = (ACTOR, CRITIC, DISTILLED)
    """Losses for which a tensor of the trainer's batch is meaningful."""
    minus: tuple[str, str] | None = None
    """Computed as the first column minus the second; where the second is ``old_log_prob`` and ``old_log_prob_used`` is
    known, minus that."""
    is_ratio: bool = False
    """Whether the value is exp of that difference, of two log-probs."""
    is_essential: bool = False
    """Whether it is among a culprit's first numbers."""
    is_summed: bool = False
    """Whether a span's number is the sum of its tokens'."""
    shade: Shade | None = None


_LOGS = (ACTOR, DISTILLED)
_SPIKE = Shade("orange adds to the spike, blue pulls the other way", 1e-6)
_COEFFICIENT = Shade(
    "d loss / d log-prob; orange lowers the token's probability (a critic's value), blue raises it", 1e-12
)
_LIKELIER = Shade("log of new / old; orange above 1, blue below", 0.2)
_SIGNED = Shade("orange positive, blue negative", 1.0)
_SPREAD = Shade("of the distribution the token was drawn from, in nats", 1.0, is_diverging=False)
_ENGINES = Shade("trainer minus rollout engine; orange above, blue below", 0.1)
COLUMNS = {
    "share": Column("share of the spike", "Its share of the spike; all add up to 1.", is_summed=True, shade=_SPIKE),
    "share_error": Column("its standard error", "Standard error of the share.", is_summed=True),
    "coefficient": Column(
        "d loss / d log-prob", "All terms; of a critic d loss / d value.", "1/nat", shade=_COEFFICIENT
    ),
    "kl_coefficient": Column("of it the KL term", "The KL term's part of the coefficient.", "1/nat"),
    "entropy_coefficient": Column("d loss / d entropy", "d loss / d entropy.", "1/nat"),
    "value": Column("value", "The critic's prediction in the training forward.", "reward", is_essential=True),
    "old_value": Column("value before the update", "The critic's prediction before the update.", "reward"),
    "value_target": Column(
        "return",
        "The return that the value is fitted to.",
        unit="reward",
        tensor="returns",
        losses=(CRITIC,),
        is_essential=True,
    ),
    "ratio": Column(
        "ratio new / old",
        "The importance ratio: probability in the training forward over that before the update.",
        minus=("log_prob", "old_log_prob"),
        is_ratio=True,
        is_essential=True,
        shade=_LIKELIER,
    ),
    "advantage": Column(
        "advantage",
        "The advantage.",
        tensor="advantages",
        losses=(ACTOR, CRITIC),
        is_essential=True,
        shade=_SIGNED,
    ),
    "entropy": Column("entropy", "Entropy of its distribution.", "nat", is_essential=True, shade=_SPREAD),
    "log_prob": Column("log-prob", "Log of its probability in the training forward.", "nat", is_essential=True),
    "old_log_prob_used": Column(
        "old log-prob, used", "That the loss compared with; on policy it takes the current one instead.", "nat"
    ),
    "old_log_prob": Column("old log-prob, stored", "From before the update.", "nat", "old_log_probs", _LOGS),
    "rollout_log_prob": Column("rollout log-prob", "The rollout engine's.", "nat", "rollout_log_probs", _LOGS),
    "ref_log_prob": Column("reference log-prob", "The reference model's.", "nat", "ref_log_prob", (ACTOR,)),
    "teacher_log_prob": Column(
        "teacher's log-prob",
        "Where distillation is the whole loss.",
        unit="nat",
        tensor="teacher_log_probs",
        losses=(DISTILLED,),
    ),
    "ratio_to_rollout": Column(
        "ratio old / rollout",
        "Probability before the update over the rollout engine's.",
        minus=("old_log_prob", "rollout_log_prob"),
        is_ratio=True,
    ),
    "gap": Column(
        "log-prob gap",
        "Log-prob in the training forward minus the rollout engine's.",
        unit="nat",
        minus=("log_prob", "rollout_log_prob"),
        shade=_ENGINES,
    ),
    "is_weight": Column(
        "rollout-correction weight",
        "Weight of the rollout correction.",
        tensor="rollout_is_weights",
        losses=_LOGS,
    ),
    "loss_weight": Column(
        "weight in the loss",
        "In a loop without advantages: -coefficient times the number of tokens.",
        tensor="loss_weights",
        losses=_LOGS,
    ),
    "response_mask": Column("", "1 where the token is part of the loss.", tensor="response_mask"),
}
STORED = {name: column for name, column in COLUMNS.items() if column.minus is None}
"""Columns that a file stores."""
TENSORS = tuple(column.tensor for column in STORED.values() if column.tensor)
"""The tensors (R, T) of a trainer's batch that are columns."""
SHOWN = {name: column for name, column in COLUMNS.items() if column.label}
OF_A_TOKEN = {name: column for name, column in SHOWN.items() if not column.is_summed}
"""Columns that a culprit has at its peak, computed ones included."""


def value(values: Mapping[str, float], name: str) -> float | None:
    """Return a column of one token, computed where it is not stored.

    Args:
        values: the token's numbers by stored column.
        name: the column's name.

    Returns:
        None where it, or what it is computed from, is not known.

    >>> value({"log_prob": -1.0, "old_log_prob": -1.0, "old_log_prob_used": -2.0}, "ratio")
    2.718281828459045
    """
    minus = COLUMNS[name].minus
    if minus is None:
        return values.get(name)
    first, second = values.get(minus[0]), values.get(f"{minus[1]}_used", values.get(minus[1]))
    if first is None or second is None:
        return None
    difference = first - second
    if not COLUMNS[name].is_ratio:
        return difference
    return exp(difference)


def exp(value: float) -> float:
    """Return e ** value; infinity where no float holds it, NaN for NaN."""
    return math.exp(value) if not value >= 700 else math.inf


def column(columns: Mapping[str, tuple[float, ...]], name: str) -> tuple[float, ...] | None:
    """Return a column over the tokens of a sequence (T,), cut to the shortest column that it reads."""
    if COLUMNS[name].minus is None:
        return columns.get(name)
    first, second = COLUMNS[name].minus or ("", "")
    read = {key: columns[key] for key in (first, second, f"{second}_used") if key in columns}
    rows = (dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=False))
    found = [value(row, name) for row in rows]
    return None if not found or None in found else tuple(found)  # type: ignore[arg-type]
