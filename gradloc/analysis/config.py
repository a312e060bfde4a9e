# SPDX-License-Identifier: Apache-2.0
"""The settings of the gradient analyses, read from verl's config and checked at start."""

from dataclasses import dataclass
from typing import Any

from ..checks import is_int, require
from .buckets import split as buckets
from .quartiles import split as quartiles

__all__ = [
    "BucketSettings",
    "QuartileSettings",
    "check_geometry",
    "check_separate",
    "geometry",
    "read_buckets",
    "read_quartiles",
]

_TRAINER, _ROLLOUT = "trainer", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class BucketSettings:
    """When the gradient is split by bucket, and whose."""

    every: int = 50
    """Analyse at the steps where ``(global_step - 1) % every == 0``: 1, 51, 101, ..."""
    exit_after: bool = False
    """End the run after the first analysis, before the actor's update, checkpoints and validation."""
    env_groups: int | None = None
    """Prompts of a separate analysis batch; None: as many as the training batch has."""
    group_size: int | None = None
    """Rollouts per prompt of a separate analysis batch; None: ``rollout.n``."""
    num_buckets: int = 6
    bucket_mode: str = "quantile"

    def __post_init__(self):
        key = f"{_TRAINER}.gradient_analysis"
        require(is_int(self.every, 1), f"{key}_every", "an integer of at least 1", self.every)
        require(
            isinstance(self.exit_after, bool),
            f"{_TRAINER}.exit_after_gradient_analysis",
            "true or false",
            self.exit_after,
        )
        for name in ("env_groups", "group_size"):
            value = getattr(self, name)
            require(value is None or is_int(value, 1), f"{key}_{name}", "null or an integer of at least 1", value)
        rollout = f"{_ROLLOUT}.gradient_analysis"
        require(is_int(self.num_buckets, 1), f"{rollout}_num_buckets", "an integer of at least 1", self.num_buckets)
        require(
            self.bucket_mode in buckets.MODES, f"{rollout}_bucket_mode", f"one of {buckets.MODES}", self.bucket_mode
        )

    @property
    def is_separate(self) -> bool:
        """Whether the analysis rolls out a batch of its own."""
        return self.env_groups is not None or self.group_size is not None

    def is_due(self, global_step: int) -> bool:
        return (global_step - 1) % self.every == 0


@dataclass(frozen=True)
class QuartileSettings:
    """When the gradient is split by probability quartile, and how."""

    every: int = 50
    """Analyse at the steps where ``(global_step - 1) % every == 0``: 1, 51, 101, ..."""
    split: str = "quantile"
    num_tokens: int = 64
    """Tokens whose own gradient is measured, one backward each."""
    exit_after = False  # training always goes on

    def __post_init__(self):
        key = f"{_TRAINER}.quartile_analysis"
        require(is_int(self.every, 1), f"{key}_every", "an integer of at least 1", self.every)
        require(self.split in quartiles.SPLITS, f"{key}_split", f"one of {quartiles.SPLITS}", self.split)
        require(is_int(self.num_tokens, 0), f"{key}_num_tokens", "an integer from 0 on", self.num_tokens)

    def is_due(self, global_step: int) -> bool:
        return (global_step - 1) % self.every == 0


def read_quartiles(config: Any) -> QuartileSettings | None:
    """Read and check the keys of the quartile analysis, whether or not it is on.

    Args:
        config: the trainer's whole config; keys that an older config lacks take their defaults.

    Returns:
        None while ``trainer.quartile_analysis_mode`` is off.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    mode = config.trainer.get("quartile_analysis_mode", False)
    require(isinstance(mode, bool), f"{_TRAINER}.quartile_analysis_mode", "true or false", mode)
    names = ("every", "split", "num_tokens")
    given = {name: config.trainer.get(f"quartile_analysis_{name}", getattr(QuartileSettings, name)) for name in names}
    settings = QuartileSettings(**given)
    return settings if mode else None


def read_buckets(config: Any) -> BucketSettings | None:
    """Read and check the keys of the analysis by bucket, whether or not it is on.

    Args:
        config: the trainer's whole config; keys that an older config lacks take their defaults.

    Returns:
        None while ``trainer.gradient_analysis_mode`` is off.

    Raises:
        ValueError: one sentence that names the key, what it must be and what was found.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    mode = trainer.get("gradient_analysis_mode", False)
    require(isinstance(mode, bool), f"{_TRAINER}.gradient_analysis_mode", "true or false", mode)
    settings = BucketSettings(
        every=trainer.get("gradient_analysis_every", 50),
        exit_after=trainer.get("exit_after_gradient_analysis", False),
        env_groups=trainer.get("gradient_analysis_env_groups"),
        group_size=trainer.get("gradient_analysis_group_size"),
        num_buckets=rollout.get("gradient_analysis_num_buckets", 6),
        bucket_mode=rollout.get("gradient_analysis_bucket_mode", "quantile"),
    )
    return settings if mode else None


def check_geometry(settings: BucketSettings, config: Any, num_prompts: int) -> None:
    """Refuse a separate analysis batch that could not be drawn or dealt out to the ranks.

    Args:
        settings: with the batch's size.
        config: the trainer's whole config.
        num_prompts: prompts in the training set.

    Raises:
        ValueError: one sentence that names the key.
    """
    if not settings.is_separate:
        return
    key = f"{_TRAINER}.gradient_analysis_env_groups"
    groups, size = geometry(settings, config)
    require(groups <= num_prompts, key, f"at most the {num_prompts} prompts of the training set", groups)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    require(
        groups * size % ranks == 0,
        key,
        f"a number that times the group size ({size}) is a multiple of the {ranks} data-parallel ranks",
        groups,
    )


def check_separate(settings: BucketSettings, because: str) -> None:
    """Refuse a separate analysis batch where a trainer cannot have one.

    Args:
        settings: with the batch's size.
        because: as it reads in brackets.

    Raises:
        ValueError: one sentence that names the key.
    """
    for name in ("env_groups", "group_size"):
        value = getattr(settings, name)
        require(value is None, f"{_TRAINER}.gradient_analysis_{name}", f"null here ({because})", value)


def geometry(settings: BucketSettings, config: Any) -> tuple[int, int]:
    """Prompts and rollouts per prompt of the separate analysis batch."""
    groups = settings.env_groups or config.data.train_batch_size
    return groups, settings.group_size or config.actor_rollout_ref.rollout.n
