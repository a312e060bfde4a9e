# SPDX-License-Identifier: Apache-2.0
"""Sentences about culprits: their share of the gradient, their group, the engine's log-probs."""

import math
import statistics
from collections.abc import Sequence

from ..record import Culprit, Event
from .causes import GROUPED
from .numbers import number, percent, with_error

_SLACK = 1.01
"""Tolerance on an estimator's largest advantage, for its epsilon and for rounding."""
_FROM_ZERO = 0.5
"""Share of the mean |advantage| from which a group's mean advantage is not 0."""
_ROUNDING = 1e-6
"""Relative difference below which two rewards are equal."""


def trusted_share(event: Event, culprit: Culprit) -> float | None:
    """Return the culprit's share; None where it comes from token shares that do not add up."""
    is_trusted = culprit.is_exact or event.shares is None or event.shares.is_trusted
    return culprit.share if is_trusted else None


def carried(event: Event, culprits: Sequence[Culprit]) -> str | None:
    """Return the share of the gradient that some culprits of an event carry, with its standard error: ``75% +- 0.3%``.

    None where the share of one is not known, or cannot be trusted.
    """
    shares = [trusted_share(event, culprit) for culprit in culprits]
    known = [found for found in shares if found is not None and math.isfinite(found)]
    if not known or len(known) < len(shares):
        return None
    error = math.hypot(*(culprit.share_error or 0.0 for culprit in culprits))
    return with_error(sum(known), error, 3, percent)


def shares_sentence(event: Event) -> str:
    """Say what the measured shares add up to, and what of them is at tokens where engine and trainer differ; empty
    where they were not measured."""
    if event.shares is None:
        return ""
    total = with_error(event.shares.closure, event.shares.closure_error)
    if not event.shares.is_trusted:
        instead = "Norms are used instead; a share that is still shown was measured by its own backward"
        return f"The tokens' shares do not add up: their sum is {total}, not 1. {instead}."
    said, found = f"The measured shares add up to {total}.", event.mismatch
    if found is None or not found.token_share:
        return said
    shares = f"{percent(found.spike_share, 3)} of the spike, and are {percent(found.token_share, 2)} of the batch"
    return f"{said} Tokens at which rollout engine and trainer differ by more than noise carry {shares}."


def engine_words(culprit: Culprit) -> str:
    """Give both sides' log-probs of a token that was not sampled, or whose log-prob is another token's.

    Begins with a colon, to follow the cause's title; empty for other causes.
    """
    if culprit.cause.label not in ("not_sampled", "shifted_log_probs"):
        return ""
    old, engines, now = (culprit.at(name) for name in ("old_log_prob", "rollout_log_prob", "log_prob"))
    before = "" if old in (None, engines) else f" {number(old, 3)} before the update and"
    return f": the engine says log-prob {number(engines, 3)}, the trainer{before} {number(now, 3)} now"


def group_sentence(event: Event) -> str:
    """Explain why the estimator cannot give the largest culprit's advantage; empty where it can."""
    culprit = event.leader or Culprit()
    known = {name: value for name, value in culprit.cause.numbers.items() if value is not None}
    if "rollouts" not in known:
        return ""
    rollouts, advantage = int(known["rollouts"]), culprit.at("advantage") or 0.0
    if known.get("group_size") == 1:
        drawn = f", though {rollouts} are drawn" if rollouts > 1 else ""
        return f"Its prompt has no other response in the batch{drawn}: nothing is subtracted from its reward."
    if known.get("group_spread", math.inf) <= _ROUNDING * abs(culprit.reward or 0.0):
        return f"All rewards of its group are {number(culprit.reward, 3)}, and then its advantage is 0."
    if "advantage_bound" in known and abs(advantage) > _SLACK * known["advantage_bound"]:
        most, name = number(known["advantage_bound"], 3), GROUPED.get(event.run.estimator or "", "its estimator")
        return f"{name} gives at most {most} with {rollouts} responses."
    mean = known.get("group_mean", 0.0)
    siblings = [sibling.advantage or 0.0 for sibling in culprit.siblings or ()]
    if abs(mean) > _FROM_ZERO * statistics.fmean(map(abs, (advantage, *siblings))):
        return f"The advantages of its group have a mean of {number(mean, 3)}, not 0."
    return ""


def repeat_sentence(culprit: Culprit) -> str:
    """Say in how many events the same token, never sampled, ended a turn; empty for the first."""
    num_events = culprit.cause.numbers.get("events_ended") or 0
    return f"In {num_events:.0f} events by now, the same token ends a turn unsampled." if num_events > 1 else ""
