# SPDX-License-Identifier: Apache-2.0
"""Describe cures in events: settings that would have prevented a spike (docs/cures.md).

The table of actions has the line of each cure, the table of causes the cures of each cause.
"""

from typing import Any

from ..record import Cured, Event
from .advice import ACTIONS, Option, is_trl, options_of, parsed
from .causes import cause_info
from .numbers import bounded, number, percent

_LOSS_BLOCKS = ("actor_rollout_ref.actor.", "critic.", "distillation.")
"""Blocks of verl's config with the settings of a loss."""
OF_MASK = ("veto", "drop_sequences")
"""Cures that take tokens out of the loss."""
OF_BATCH = ("truncate", "clip_tokens", "clip_sequences", "weigh_tokens", "divide", "mean_only", "reweight", *OF_MASK)
"""Cures that change the batch's tensors; only the loss reads the others."""
_MEASURED_ON_TRL = ("truncate", "divide", "mean_only")
"""Those of :data:`OF_BATCH` that can be measured on TRL's batch."""
MILDEST_FIRST = (
    *("clip_ratios", "dual_clip", "truncate", "clip_tokens", "clip_sequences", "divide", "mean_only", "kl_low_var"),
    *("kl_mse", "less_kl", "no_entropy", "bound_value", "clamp_teacher", "off_policy_mask", "reweight"),
    *("weigh_tokens", *OF_MASK, "cispo", "sapo", "gspo", "kl_cov", "gpg", "by_sequence"),
)
"""All cures, the one that changes least first."""


def loss_settings(option: Option) -> dict[str, Any]:
    """Return an option's settings by the names that the loss reads, with ``.`` between block and name.

    >>> loss_settings(Option("", {"actor_rollout_ref.actor.clip_ratio_c": "2.0", "loss_type": "grpo"}))
    {'clip_ratio_c': 2.0, 'loss_type': 'grpo'}
    """
    found = {}
    for name, value in option.settings.items():
        for block in _LOSS_BLOCKS:
            name = name.removeprefix(block)
        found[name] = parsed(value)
    return found


def cures_for(event: Event) -> tuple[Cured, ...] | None:
    """Return an event's cures that were measured or that are for one of its causes; None where none was tried."""
    if event.cures is None:
        return None
    labels = {culprit.cause.label for culprit in event.culprits} | {event.cause.label if event.cause else "unknown"}
    for_causes = {name for label in labels for name in cause_info(label).cures}
    return tuple(cured for cured in event.cures if cured.forwards or cured.name in for_causes)


def healer(event: Event) -> Cured | None:
    """Return the first cure that heals the step; None where none does."""
    return next((cured for cured in event.cures or () if cured.verdict == "healed"), None)


def how_healed(event: Event, cured: Cured) -> str:
    """Say how a cure changes the norm, and its cost: ``On this step: 7,729 → 3.04, threshold 19.``"""
    before, after = number(event.trigger.grad_norm), number(cured.norm_after, 3)
    kept = f" It keeps {percent(cured.kept)} of the healthy step's direction" if cured.kept is not None else ""
    changed = f"{' and' if kept else ' It'} changes {percent(cured.changed_tokens)} of the tokens' coefficients."
    return f"On this step: {before} → {after}, threshold {number(event.trigger.threshold, 3)}.{kept}{changed}"


def failed_cures(event: Event) -> list[str]:
    """Return a sentence for each cure that was tried and does not heal the step."""
    return [_outcome(cured) for cured in event.cures or () if cured.verdict != "healed"]


def cure_text(cured: Cured) -> str:
    """Return what to do, in this version's words; the event's own line where this version has no such cure."""
    return ACTIONS[cured.name].do if cured.name in ACTIONS else cured.line


def _outcome(cured: Cured) -> str:
    do = cure_text(cured)
    if cured.verdict == "no_change":
        return f"{do} It would change nothing here: no token's coefficient would be another."
    norm = "".join(bounded(cured.norm_after, cured.error_bound, 3))
    if cured.verdict == "undecided":
        return f"{do} The norm would be {norm}, too near the threshold to say."
    least = "" if cured.forwards else "at least "
    return f"{do} The norm would still be {least}{norm}."


def is_measured(name: str, trainer: str) -> bool:
    """Return whether a cure is measured on a trainer such as ``verl 0.9``."""
    can_change = not is_trl(trainer) or name in _MEASURED_ON_TRL or name not in OF_BATCH
    return bool(options_of(name, trainer)) and can_change
