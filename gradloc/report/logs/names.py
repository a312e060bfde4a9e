# SPDX-License-Identifier: Apache-2.0
"""Numbers as logs spell them, and what trainers call the metrics that the rules know by verl's names."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from .recording import MAX, MEAN

STEPS = tuple(
    "global_step global_steps training/global_step train/global_step trainer/global_step step train/step current_steps "
    "global_step/max_steps iteration iter num_updates _step".split()
)
"""What a step is called, the surest first: a ``step`` may begin anew in each epoch, and W&B's ``_step`` counts calls of
its own."""

ALIASES = {
    "critic/score/mean": "reward reward_mean mean_reward avg_reward rewards_mean raw_reward score score_mean "
    "scores avg_total_reward task_reward_avg",
    "actor/entropy": "entropy entropy_loss entropy_mean mean_entropy policy_entropy approx_entropy entropy_avg",
    "actor/kl_loss": "kl kl_loss kl_mean kl_div mean_kl reference_kl",
    "actor/ppo_kl": "ppo_kl approx_kl approxkl_avg policy_approxkl_avg",
    "actor/pg_loss": "pg_loss policy_loss act_loss loss_policy_avg actor_loss",
    "actor/pg_clipfrac": "pg_clipfrac clip_ratio clip_ratio_region_mean clipfrac_avg policy_clipfrac_avg",
    "response_length/mean": "response_length response_len_mean response_length_mean completion_length "
    "completions_mean_length mean_generation_length mean_gen_tokens_per_sample",
    "response_length/clip_ratio": "completions_clipped_ratio truncated_ratio truncated_rate response_clip_ratio",
    "rollout/zero_variance_share": "frac_reward_zero_std",
    "rollout_corr/kl": "gen_kl_error generation_kl_error mismatch_kl mismatch_kl_mean",
}
"""verl's names, and what other trainers call the same, as :func:`_plain` spells it."""
_KNOWN = {alias: name for name, aliases in ALIASES.items() for alias in aliases.split()}
_PARTS = re.compile(r"^(?:train|training|rollout|actor|policy|objective|(?:pp|grp)o_actor(?:_update)?)_")
_WRAPPED = re.compile(
    r"\s*(?P<call>[A-Za-z_][\w.]*\()?\[?\s*"  # tensor( np.float64( [
    r"(?P<value>[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))"
    r"\s*\]?(?(call)(?:,[^()]*)?\)?|(?:/[^()]*)?)\s*(?:%|m?s|it/s|tokens/s|GiB|GB|x)?\s*",
    re.IGNORECASE,
)
_NORM = re.compile(r"grad(?:ient)?s?(?:l2|total|global)?norm|gnorm|norm(?:of)?grad")
_SETTING = re.compile(r"max_?grad_?norm|clip_?grad_?norm|threshold|norm_?clip$", re.IGNORECASE)


def number(text: Any, is_decimal_comma: bool = False) -> float | None:
    """A number as a log spells it; None where it is none.

    >>> number("tensor(0.25, device='cuda:0')"), number("np.float64(1e-06)"), number("24.44s"), number(True)
    (0.25, 1e-06, 24.44, None)
    >>> number("1.234,5", is_decimal_comma=True), number("1,234.5"), number("5/100"), number("0,49"), number("info")
    (1234.5, 1234.5, 5.0, None, None)
    """
    if isinstance(text, bool):
        return None
    if is_decimal_comma and "," in text and text.rfind(".") < text.rfind(","):
        text = text.replace(".", "").replace(",", ".")
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        wrapped = _WRAPPED.fullmatch(text) if isinstance(text, str) else None
        return float(wrapped["value"].replace(",", "")) if wrapped else None


def numbers(data: Mapping[Any, Any]) -> dict[str, float]:
    """The entries that are numbers, or spell one; of nested ones, those inside."""
    made = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            made.update({f"{name}/{inner}": known for inner, known in numbers(value).items()})
        elif (known := number(value)) is not None:
            made[str(name)] = known
    return made


def step_of(values: Mapping[str, float | None]) -> int | None:
    """The step that a row says it is of."""
    return as_step(next((values[name] for name in STEPS if name in values), None))


def as_step(value: float | None) -> int | None:
    """A number as a step; None where it is none."""
    return int(value) if value is not None and abs(value) < 2**53 else None


@lru_cache(maxsize=4096)  # asked of the same few names in every row
def is_norm(name: str) -> bool:
    """Whether a metric's name looks like a gradient norm, and not like a limit of one.

    >>> is_norm("Grad. Norm"), is_norm("train/global_gradient_norm"), is_norm("max_grad_norm"), is_norm("loss")
    (True, True, False, False)
    """
    return _NORM.search(re.sub(r"[^a-z0-9]", "", name.lower())) is not None and not _SETTING.search(name)


def norm_of(names: Iterable[str]) -> str | None:
    """The metric that holds the gradient norms: the actor's, else the one that looks like it.

    None when no name looks like a gradient norm, or several do.
    """
    norms = [name for name in names if is_norm(name)]
    for known in (MAX, MEAN):
        if known in norms:
            return known
    norms = [name for name in norms if not re.search(r"critic|value|ref|disc|layer|\d", name.lower())] or norms
    norms = [name for name in norms if _plain(name) == "grad_norm"] or norms
    return norms[0] if len(norms) == 1 else None


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in one line, the first ones."""
    names = [name for name in names if not name.startswith("_")]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest if names else "none"


def canonical(names: Iterable[str]) -> dict[str, str]:
    """verl's name -> the name in the log, for the metrics that another trainer calls otherwise."""
    names = list(names)
    own: dict[str, str] = {}
    for name in sorted(names, key=len):
        known = _KNOWN.get(_plain(name))
        if known is not None and known not in names and not name.startswith(("eval", "val", "test")):
            own.setdefault(known, name)
    return own


def _plain(name: str) -> str:
    """A metric's name in small letters, without what says that it is of training.

    >>> _plain("train/Grad. Norm"), _plain("rollout/raw_reward")
    ('grad_norm', 'raw_reward')
    """
    return _PARTS.sub("", re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"))
