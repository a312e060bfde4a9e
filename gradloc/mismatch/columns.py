# SPDX-License-Identifier: Apache-2.0
"""Two columns of log-probs of the same tokens, and what else is known of each token; checked once, here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..explain.text import plural

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FEW = 200
"""Tokens that a verdict needs at least."""


class MismatchError(ValueError):
    """Says in one sentence what about the columns cannot be used, and what to do."""


class TooFewTokensError(MismatchError):
    """Says that the columns are shorter than a verdict needs."""


class SeveralRunsError(MismatchError):
    """Says that a folder holds the same step more than once."""


@dataclass(frozen=True)
class Columns:
    """N tokens of R rows, in the order of their rows and places; all arrays are (N,), an optional one may be None."""

    rollout: Floats
    """The rollout engine's log-prob of the token, nats: b. NaN where it has none."""
    trainer: Floats
    """The trainer's: a."""
    row: Ints
    """0 to R - 1."""
    place: Ints
    """The token's position in its row, from 0; masked tokens count."""
    order: Ints
    """The row's number in the batch, where rows may have been left out."""
    ids: Ints | None = None
    group: Ints | None = None
    """The index of the prompt that the token's row answers."""
    prompt: Ints | None = None
    """Tokens of the row's prompt."""

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def difference(self) -> Floats:
        """d = a - b, nats; the importance ratio is exp(d)."""
        return self.trainer - self.rollout

    def only(self, kept: NDArray[np.bool_]) -> Columns:
        """Return the tokens at which ``kept`` (N,) is true."""
        found: dict[str, Any] = {name: None if value is None else value[kept] for name, value in vars(self).items()}
        return Columns(**found)


Rows = Sequence[ArrayLike] | NDArray[Any]
"""(R, T), or R rows of any length."""


def columns(
    rollout: Rows,
    trainer: Rows,
    mask: Rows | None = None,
    *,
    ids: Rows | None = None,
    group: Sequence[object] | None = None,
    prompt: Sequence[int] | None = None,
) -> Columns:
    """Return rows of log-probs as :class:`Columns`.

    Args:
        rollout: the rollout engine's log-probs in nats: (R, T), or R rows of any length.
        trainer: the trainer's, of the same shape, before its update.
        mask: which tokens count; all where None.
        ids: token ids.
        group: of each row, what names its prompt.
        prompt: of each row, its prompt's length in tokens.

    Raises:
        MismatchError: if the shapes differ, too few tokens count, or the numbers are no log-probs.
    """
    flat: dict[str, NDArray] = {}
    lengths = np.array([np.size(row) for row in rollout], np.int64)
    for name, rows in (("rollout", rollout), ("trainer", trainer), ("mask", mask), ("ids", ids)):
        if rows is None:
            continue
        theirs = np.array([np.size(row) for row in rows], np.int64)
        if not np.array_equal(theirs, lengths):
            where = "" if theirs.shape != lengths.shape else f" (row {int(np.argmax(theirs != lengths))})"
            raise MismatchError(
                f"{name} has {theirs.sum()} values in {len(theirs)} rows, the rollout's log-probs {lengths.sum()} in "
                f"{len(lengths)}{where}: give every column of the same tokens, responses only or whole sequences."
            )
        kind = {"mask": bool, "ids": np.int64}.get(name, np.float64)
        flat[name] = np.concatenate([np.zeros(0), *(np.ravel(np.asarray(row)) for row in rows)]).astype(kind)
    row = np.repeat(np.arange(len(lengths)), lengths)
    flat["place"] = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
    for name, values in (("group", group), ("prompt", prompt)):
        if values is None:
            continue
        if len(values) != len(lengths):
            raise MismatchError(f"{name} has {len(values)} values, and there are {len(lengths)} rows: give one a row.")
        numbers = np.unique([str(v) for v in values], return_inverse=True)[1] if name == "group" else values
        flat[name] = np.asarray(numbers, np.int64)[row]
    is_masked = "mask" in flat
    counts = flat.pop("mask", np.ones(len(row), bool))
    made = Columns(row=row, order=row, **flat).only(counts)
    _check(made, is_masked)
    return replace(made, row=np.unique(made.row, return_inverse=True)[1])


def _check(made: Columns, is_masked: bool) -> None:
    if len(made) < FEW:
        tokens = plural(len(made), "token")
        given = f"The response mask leaves {tokens}" if is_masked else f"The columns have {tokens}"
        fix = ", or fix the mask" if is_masked else ""
        raise TooFewTokensError(f"{given}, and a verdict needs {FEW}: give more rows{fix}.")
    for name, column in (("rollout engine", made.rollout), ("trainer", made.trainer)):
        known = column[np.isfinite(column)]
        if len(known) < len(column) / 2:
            raise MismatchError(
                f"{len(column) - len(known):,} of {len(column):,} log-probs of the {name} are not finite: "
                "was it asked for log-probs (logprobs=0 in vLLM, calculate_log_probs in verl)?"
            )
        positive = known > 0.05
        if positive.mean() > 0.01:
            raise MismatchError(
                f"{positive.mean():.0%} of the log-probs of the {name} are above 0 (as large as {known.max():.3g}): "
                "these may be probabilities or logits; give natural logarithms."
            )
        if not (known < -1e-6).any():
            raise MismatchError(f"all log-probs of the {name} are 0: it returned none; ask the engine for log-probs.")
