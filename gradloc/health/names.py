# SPDX-License-Identifier: Apache-2.0
"""TRL's metrics and verl's names for the same, which the rules of health and the page know. Standard library only."""

from collections.abc import Iterable, Iterator

__all__ = ["FROM_TRL", "known_as"]

FROM_TRL = {
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "reward": "critic/score/mean",
    "frac_reward_zero_std": "rollout/zero_variance_share",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "sampling/importance_sampling_ratio/mean": "rollout_corr/rollout_is_mean",
}
_OURS = ("gradloc/", "health/", "actor/")


def known_as(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a logged name and another that it goes by here; trackers have put ``train/`` before."""
    for name in names:
        plain = name.removeprefix("train/")
        ours = plain if plain.startswith(_OURS) else FROM_TRL.get(plain, name)
        if ours != name:
            yield name, ours
