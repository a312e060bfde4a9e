# SPDX-License-Identifier: Apache-2.0
"""The settings of the gradient analyses, read from verl's config and checked at start."""

from dataclasses import dataclass
from typing import Any

from ..checks import SWITCH, check_fields, integer, one_of, or_null, read_among, require, setting
from .buckets import split as buckets
from .quartiles import split as quartiles

_TRAINER, _ROLLOUT = "trainer", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class BucketSettings:
    """When the gradient is split by bucket, and whose."""

    mode: bool = setting(False, SWITCH, f"{_TRAINER}.gradient_analysis_mode")
    """Whether it is."""
    every: int = setting(50, integer(1), f"{_TRAINER}.gradient_analysis_every")
    """Analyse at the steps where ``(global_step - 1) % every == 0``: 1, 51, 101, ..."""
    exit_after: bool = setting(False, SWITCH, f"{_TRAINER}.exit_after_gradient_analysis")
    """End the run after the first analysis, before the actor's update, checkpoints and validation."""
    env_groups: int | None = setting(None, or_null(integer(1)), f"{_TRAINER}.gradient_analysis_env_groups")
    """Prompts of a separate analysis batch; None: as many as the training batch has."""
    group_size: int | None = setting(None, or_null(integer(1)), f"{_TRAINER}.gradient_analysis_group_size")
    """Rollouts per prompt of a separate analysis batch; None: ``rollout.n``."""
    num_buckets: int = setting(6, integer(1), f"{_ROLLOUT}.gradient_analysis_num_buckets")
    bucket_mode: str = setting("quantile", one_of(*buckets.MODES), f"{_ROLLOUT}.gradient_analysis_bucket_mode")

    def __post_init__(self):
        check_fields(self)

    @property
    def is_separate(self) -> bool:
        """Whether the analysis rolls out a batch of its own."""
        return self.env_groups is not None or self.group_size is not None


@dataclass(frozen=True)
class QuartileSettings:
    """When the gradient is split by probability quartile, and how."""

    mode: bool = setting(False, SWITCH, f"{_TRAINER}.quartile_analysis_mode")
    """Whether it is."""
    every: int = setting(50, integer(1), f"{_TRAINER}.quartile_analysis_every")
    """As of the buckets."""
    split: str = setting("quantile", one_of(*quartiles.SPLITS), f"{_TRAINER}.quartile_analysis_split")
    num_tokens: int = setting(64, integer(0), f"{_TRAINER}.quartile_analysis_num_tokens")
    """Tokens whose own gradient is measured, one backward each."""
    exit_after = False  # training always goes on

    def __post_init__(self):
        check_fields(self)


def read_quartiles(config: Any) -> QuartileSettings | None:
    """The settings of the quartile analysis, see :func:`~..checks.read_among`; None while it is off."""
    settings = read_among(QuartileSettings, config)
    return settings if settings.mode else None


def read_buckets(config: Any) -> BucketSettings | None:
    """The settings of the analysis by bucket, likewise."""
    settings = read_among(BucketSettings, config)
    return settings if settings.mode else None


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
