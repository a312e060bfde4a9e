# SPDX-License-Identifier: Apache-2.0
"""Name the disagreement of two columns of log-probs, or say "cannot tell".

Looks go from the local to the whole: each takes out, or mends, the tokens that it explains. One table, `WHOLE`, names
what the rest has in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from . import stats
from .columns import FEW, Columns, Floats, columns
from .kinds import DOUBTS, NOTHING
from .stats import Numbers, Tokens

FLOOR = 0.14
"""Noise of logits that bfloat16 kernels have, nats: of real forwards, times about two."""
FADED_KL = 0.005
"""The KL that a cut tail still causes among the tokens above it."""
FADES = 3.0
"""Nats above the likeliest token of a tail at which it has faded."""
EFFECT = 0.04
"""The share of the variance below which a dependence is no sign of other weights, however significant."""
LEAST = 0.02
"""Nats of logits: below it two columns agree, whatever the rest looks like."""
UPPER, HIGHEST = 0.25, 0.4
"""Nats of logits, of one token in a hundred and of one in a thousand, two at least: neither cut sampling nor noise
raises any so far."""
TILT = 0.1
"""The distance from 1 that other weights alone do not reach; see :func:`~.stats.identity`."""
SMALL_KL = 0.028
"""The KL per token that separates another version of the policy (below) from another model (above)."""
FEW_OUTLIERS = 0.04
"""The share of tokens that may be outliers under other weights without being a kind of their own."""
RAISED = "raised"
"""Evidence that is no kind: single tokens, likely ones among them, of which the trainer's are nearly all higher."""
LEAST_LEFT = 50
"""Tokens that the noise of the rest needs at least."""
GAIN = 2.0
"""Ranks' differences, summed over a stretch of a row, by which a shift must mend it: of six unrelated tokens."""
TOO_FAR, TIMES_TOO_FAR = 2.0, 20.0
"""Nats, and times the noise: where the largest difference is above both, it is no noise, however few tokens have it."""
FOLLOWS = 0.85
"""Correlation of the rows' differences with what padding or packing would do."""


@dataclass(frozen=True)
class Verdict:
    """Why two columns of log-probs differ."""

    kinds: tuple[str, ...]
    """Names in :data:`~.kinds.KINDS`, the one on the most tokens first; empty where nothing can be said."""
    tokens: int
    rows: int
    noise: float
    """Spread of d / (1 - p) over the tokens that no local kind explains, nats; NaN where hardly any are left."""
    ratio: float
    """Mean of exp(d) over all tokens, each at most e^20."""
    ratio_error: float
    kl: float
    """Mean of exp(d) - 1 - d over all tokens: the k3 estimate, nats a token."""
    worst: float
    """Largest |d|."""
    evidence: dict[str, dict[str, float]] = field(default_factory=dict)
    """The numbers that each kind was named by, or that no kind fits."""
    why_not: str = ""
    """Why there is no verdict; empty where there is one."""

    @property
    def name(self) -> str:
        """The kind, two joined by " + ", or "cannot tell"."""
        return " + ".join(self.kinds) or NOTHING

    @property
    def is_healthy(self) -> bool:
        return self.kinds == ("noise",) or self.worst == 0


@dataclass(frozen=True)
class Found:
    """A kind, how many of the tokens show it, the evidence, and the tokens that still need a name."""

    kind: str
    share: float
    numbers: dict[str, float]
    rest: Columns


def judge(given: Columns) -> Verdict:
    """Name the disagreement of two columns.

    Takes time in proportion to the tokens, about a microsecond each.
    """
    whole = tokens = Tokens(given)
    evidence: dict[str, dict[str, float]] = {}
    why_not = ""
    for look in (gaps, shifted, strange_rows, strange_tokens, in_common):
        if len(tokens) < max(FEW, 0.1 * len(given)):
            break
        if look is in_common and "tail" in evidence and stats.identity(tokens.d)["kl"] < FADED_KL:
            break
        found = look(tokens)
        if isinstance(found, str):
            why_not = found
        elif found and not (evidence and found.kind == "noise"):
            numbers = evidence.setdefault(found.kind, {"token_share": found.share * len(tokens) / len(given)})
            numbers.update(found.numbers)
            tokens = Tokens(found.rest)
    if evidence.keys() & {"stale", "other_weights"}:  # whose largest differences are many
        outliers = ("routing", "never_sampled", RAISED)
        few = {kind for kind in outliers if evidence.get(kind, {}).get("share", 1) < FEW_OUTLIERS}
        evidence = {kind: numbers for kind, numbers in evidence.items() if kind not in few}
    if RAISED in evidence and not why_not:
        why_not = DOUBTS[RAISED].format(**evidence[RAISED])
    numbers = stats.identity(whole.d)
    worst = float(np.abs(whole.d).max())
    if worst == 0:
        why_not = DOUBTS["same"]
    if [*evidence] == ["noise"] and worst > max(TOO_FAR, TIMES_TOO_FAR * tokens.scale) and not why_not:
        count = int((np.abs(whole.d) > max(TOO_FAR / 2, TIMES_TOO_FAR / 2 * tokens.scale)).sum())
        why_not = DOUBTS["few"].format(count=count, worst=worst)
    return Verdict(
        kinds=() if why_not else tuple(sorted(evidence, key=lambda kind: -evidence[kind]["token_share"])),
        tokens=len(given),
        rows=int(given.row[-1]) + 1,
        noise=tokens.scale if len(tokens) >= LEAST_LEFT else float("nan"),
        ratio=numbers["mean_ratio"],
        ratio_error=numbers["ratio_error"],
        kl=numbers["kl"],
        worst=worst,
        evidence=evidence,
        why_not=why_not,
    )


def beyond_noise(rollout: Floats, trainer: Floats, mask: Floats) -> tuple[NDArray, float]:
    """Return tokens (R, T) at which two columns (R, T) differ by more than noise, and the noise, nats of logits: the
    batch's own, and at most what bfloat16 kernels have.

    Raises:
        MismatchError: as :func:`~.columns.columns`.
    """
    tokens = Tokens(columns(rollout, trainer, mask))
    noise, marks = min(tokens.scale, FLOOR), np.zeros(rollout.shape, bool)
    marks[tokens.columns.order, tokens.columns.place] = tokens.beyond(noise)
    return marks, noise


def gaps(tokens: Tokens) -> Found | None:
    """Return tokens at which the engine's log-prob is missing, or one constant while the trainer's varies."""
    columns, kind = tokens.columns, "never_sampled"
    missing = ~np.isfinite(columns.rollout)
    marks, large = missing, ~missing & (np.abs(tokens.d) > 0.3)
    values, counts = np.unique(np.round(columns.rollout[large], 6), return_counts=True)
    if len(values) and counts.max() >= max(8, 0.003 * len(large)):
        value = values[counts.argmax()]
        same = np.abs(columns.rollout - value) < 1e-6
        if same[~missing][columns.rollout[~missing].argmin()] and np.median(columns.trainer[same]) < value / 2 < -2.5:
            kind, large = "tail", same  # the constant is a bound from below
        # a log-prob that is written in few bits repeats, too: then those tokens agree elsewhere
        is_zero = value == 0 and np.median(columns.trainer[same & large]) < -1
        if is_zero:  # as of a sampler that left one token, which stand alone
            after = tokens.next & same[:-1]
            is_zero = bool(after.any()) and np.mean(same[1:][after]) > 0.6
        if is_zero or (value != 0 and np.mean(large[same]) > 0.3):
            marks = marks | same & large
    if marks.sum() < 4:
        return None
    numbers = {"constants": float((marks & ~missing).sum()), "missing": float(missing.sum())}
    return Found(kind, float(marks.mean()), numbers, columns.only(~marks))


def shifted(tokens: Tokens) -> Found | None:
    """Return stretches of rows that agree once a column is moved, by one number everywhere or by several; else None."""
    columns = tokens.columns
    lags, gains = stats.moves(tokens)
    sure = (lags != 0) & (gains > GAIN)[tokens.row]
    if sure.mean() < 0.01 or (gains > GAIN).sum() < min(3, len(gains)):
        return None
    moved = (lags != 0) & (gains > GAIN / 4)[tokens.row]  # where some are, others are likely
    values, counts = np.unique(lags[sure], return_counts=True)
    top = int(values[counts.argmax()])
    good = moved & (lags == top)
    there = stats.partners(columns, top)
    healed = np.where(good, np.where(there >= 0, columns.rollout[there], np.nan), columns.rollout)
    numbers = {
        "lag": float(top),
        "lags": float((counts > 0.05 * counts.sum()).sum()),
        "before": float(np.median(np.abs(tokens.d[good]))),
        "after": float(np.nanmedian(np.abs(columns.trainer - healed)[good])),
    }
    if counts.max() < 0.7 * counts.sum():  # from the first of them to the row's end
        begins = np.full(len(gains), len(moved))
        np.minimum.at(begins, tokens.row[moved], np.flatnonzero(moved))
        marks = np.arange(len(moved)) >= begins[tokens.row] - 3
        return Found("never_sampled", float(marks.mean()), numbers, columns.only(~marks))
    ends = np.convolve(np.diff(good, prepend=good[0]), np.ones(13), "same") > 0  # known to a few tokens
    kept = np.isfinite(healed) & ~ends & (good | ~moved)
    return Found("shift", float(moved.mean()), numbers, replace(columns, rollout=healed).only(kept))


def strange_rows(tokens: Tokens) -> Found | None:
    """Return rows that differ where others agree, by padding or packing, or because of their prompts; None without."""
    columns, row = tokens.columns, tokens.row
    if row[-1] < 7:
        return None
    first = np.flatnonzero(np.diff(row, prepend=-1))
    is_early = columns.place - columns.place[first][row] < stats.EARLY
    scales = np.maximum(stats.row_scales(tokens, np.ones(len(row), bool)), stats.row_scales(tokens, is_early))
    low = max(float(np.quantile(scales, 0.15)), LEAST)
    strange = scales > 2.5 * low
    if strange.sum() < 2:
        return None
    follows = stats.layouts(tokens, np.maximum(scales, LEAST))
    layout = max(follows, key=lambda name: abs(follows[name]))
    marks = strange[row]
    late = columns.place > np.median(columns.place)
    sizes = [np.abs(tokens.z[marks & part]).mean() if (marks & part).any() else 0.0 for part in (~late, late)]
    numbers = {
        "rows": float(strange.mean()),
        "times": float(np.median(scales[strange]) / low),
        "early_over_late": float(sizes[0] / max(sizes[1], 1e-9)),
        layout: follows[layout],
    }
    if columns.group is not None:
        groups = columns.group[first]
        numbers["whole_prompts"] = float(np.mean([strange[groups == g].mean() for g in np.unique(groups[strange])]))
    is_layout = abs(follows[layout]) > FOLLOWS
    is_few = numbers["rows"] < 0.5 and numbers.get("whole_prompts", 1.0) > 0.7  # and prompts differ as a whole
    if not is_layout and not is_few:
        return None
    if is_layout:
        marks = (scales > 1.6 * low)[row]
    return Found("padding" if is_layout else "few_rows", float(marks.mean()), numbers, columns.only(~marks))


def strange_tokens(tokens: Tokens) -> Found | None:
    """Return single tokens, runs of them, or all unlikely ones, that differ where others agree; None without any.

    Unlikely is what both sides find so: by the lower side alone, likely tokens that one side lowers would be.
    """
    marks = tokens.beyond(tokens.scale)
    if not max(8, 0.003 * len(marks)) <= marks.sum() <= 0.4 * len(marks):
        return None
    kind, share = "routing", float(marks.mean())
    larger = np.maximum(tokens.columns.trainer, tokens.columns.rollout)
    lower = float((tokens.d[marks] < 0).mean())
    after = tokens.next & marks[:-1]
    numbers = {
        "share": share,
        "together": float(marks[1:][after].mean()) if after.any() else 0.0,
        "one_sided": max(lower, 1 - lower),
        "lower": lower,
        "size": float(np.median(np.abs(tokens.d[marks]))),
        "pure": float(marks[larger <= np.quantile(larger[marks], 0.9)].mean()),
    }
    is_one_sided = numbers["one_sided"] > 0.93
    if numbers["pure"] > 0.8 and is_one_sided:
        numbers["below"] = float(np.quantile(larger[marks], 0.99))
        kind, marks = "tail", larger <= numbers["below"] + FADES
    elif numbers["together"] > max(0.3, 3 * share):
        kind = "never_sampled"
    elif is_one_sided and lower < 0.5:  # other experts lower what the engine's have drawn
        kind = RAISED
    return Found(kind, share, numbers, tokens.columns.only(~marks))


PROMPTS = {"stale": 0.15, "truncated": 0.22, "other_weights": 0.35}
"""The most that a language model's prompts differ under these kinds; see :func:`~.stats.unevenness`."""
WHOLE: dict[str, Callable[[Numbers], bool]] = {
    "truncated": lambda n: n["mean_ratio"] < 1 - max(5 * n["ratio_error"], 0.004) and n["upward"] < 0.35,
    "temperature": lambda n: (
        (abs(n["slope"] - 1) > max(0.06, 6 * n["error"]) and n["r"] > 0.94)
        or (abs(n["along"]) > 0.75 and n["noise"] > LEAST)
    ),
    "stale": lambda n: n["kl"] < SMALL_KL and stays(n),
    "other_weights": lambda n: stays(n),
    "noise": lambda n: n["noise"] <= FLOOR,
}
"""Tests of a whole batch's numbers, by kind; the first that holds names it."""


MORE: dict[str, tuple[str, Callable[[Numbers], bool]]] = {
    "nothing": ("", lambda n: True),
    "upper": ("truncated", lambda n: n["upper"] > UPPER or n["highest"] > HIGHEST),
    "bend": ("temperature", lambda n: not -0.03 < n["bend"] * np.sign(n["along"]) < most_bend(n)),
    "tilt": ("stale other_weights", lambda n: abs(n["tilt"]) > TILT and abs(n["tilt_sigma"]) > 2.5),
    "rows": ("stale noise", lambda n: n["noise"] > LEAST and n["uneven_sigma"] > 5 and n["uneven"] > 0.3),
    "prompts": (" ".join(PROMPTS), lambda n: n.get("prompts_sigma", 0) > 4 and n["prompts"] > n["prompts_usual"]),
    "cut_rows": ("truncated", lambda n: n["uneven_sigma"] > 10 and n["uneven"] > 0.5),
}
"""Tests for the further sentences of explain/mismatch.ini, by name, that a kind needs."""


def most_bend(n: Numbers) -> float:
    """Return how much wider another temperature may spread the unlikely tokens than the others.

    It is most where the two temperatures are far apart, which only sure tokens show.
    """
    return 1.25 * abs(float(np.log(n["slope"]))) if n["r"] > 0.9 else 0.3


def stays(n: Numbers) -> bool:
    """Return whether other weights make the difference: it depends on the token, or nothing else could be as large."""
    depends = any(n[f"{by}_sigma"] > 5 and n[by] > EFFECT for by in ("neighbours", "by_id") if by in n)
    return (depends and n["noise"] > LEAST) or (n["noise"] > FLOOR and not n["has_ids"])


def in_common(tokens: Tokens) -> Found | str:
    """Return what the tokens that no local kind explains have in common, or why that is not known."""
    count = max(2, len(tokens) // 1000)
    numbers = {
        "noise": tokens.scale,
        **stats.identity(tokens.d),
        "upward": float(np.maximum(tokens.d, 0).mean() / max(np.abs(tokens.d).mean(), 1e-12)),
        "upper": float(np.quantile(np.maximum(tokens.z, 0), 0.99)),
        "highest": float(np.partition(tokens.z, -count)[-count]),
        **stats.temperature(tokens),
        **stats.dependence(tokens),
        **stats.unevenness(tokens),
        "has_ids": float(tokens.columns.ids is not None),
    }
    kind = next((kind for kind, fits in WHOLE.items() if fits(numbers)), "")
    numbers["prompts_usual"] = PROMPTS.get(kind, 0.0)
    doubt = next((name for name, (kinds, holds) in MORE.items() if kind in kinds.split(" ") and holds(numbers)), None)
    return DOUBTS[doubt].format(**numbers) if doubt else Found(kind, 1.0, _known(numbers, tokens), tokens.columns)


def _known(numbers: Numbers, tokens: Tokens) -> Numbers:
    """Leave out the numbers that these tokens are too few, or too alike, to give."""
    unknown = {
        "highest": len(tokens) < 2000,  # the second highest, not one in a thousand
        "slope r error slope_tokens": numbers["slope_tokens"] < stats.FEWEST_SURE,
        "neighbours neighbours_sigma": not tokens.next.any(),
        "uneven uneven_sigma prompts prompts_sigma": not tokens.row[-1],
        "prompts_usual": not tokens.row[-1] or "prompts" not in numbers,
    }
    left_out = {name for names, is_unknown in unknown.items() if is_unknown for name in names.split(" ")}
    return {name: value for name, value in numbers.items() if name not in left_out}
