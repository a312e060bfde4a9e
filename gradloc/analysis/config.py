# SPDX-License-Identifier: Apache-2.0
"""The settings of the gradient analyses, read from verl's config and checked at start."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..checks import SWITCH, checked, integer, one_of, or_null, read_from_trainer, require, setting

_TRAINER, _ROLLOUT = "trainer", "actor_rollout_ref.rollout"


@checked(_TRAINER)
@dataclass(frozen=True)
class BucketSettings:
    """The analysis by bucket."""

    mode: bool = setting(False, SWITCH, f"{_TRAINER}.gradient_analysis_mode")
    """Analyse the gradient by reward variance."""
    every: int = setting(50, integer(1), f"{_TRAINER}.gradient_analysis_every")
    """Analyse at the steps where (global_step - 1) % every is 0: 1, 51, 101, ..."""
    exit_after: bool = setting(False, SWITCH, f"{_TRAINER}.exit_after_gradient_analysis")
    """End the run after the first analysis, before the actor's update and checkpoints; does not suppress
    ``val_before_train``."""
    env_groups: int | None = setting(None, or_null(integer(1)), f"{_TRAINER}.gradient_analysis_env_groups")
    """Prompts of a separate analysis batch; null: as in training."""
    group_size: int | None = setting(None, or_null(integer(1)), f"{_TRAINER}.gradient_analysis_group_size")
    """Rollouts per prompt of a separate analysis batch; null: ``rollout.n``. Both null: the training batch is
    analysed."""
    num_buckets: int = setting(6, integer(1), f"{_ROLLOUT}.gradient_analysis_num_buckets")
    """Buckets of ``quantile``."""
    bucket_mode: str = setting("quantile", one_of("quantile", "fixed_rv"), f"{_ROLLOUT}.gradient_analysis_bucket_mode")
    """``quantile``: groups ordered by reward deviation, cut into equal buckets. ``fixed_rv``: [0, 1), [1, 2), ...
    [5, inf); empty ones are left out."""

    @property
    def is_separate(self) -> bool:
        """Whether the analysis rolls out a batch of its own."""
        return self.env_groups is not None or self.group_size is not None


@checked(_TRAINER)
@dataclass(frozen=True)
class QuartileSettings:
    """The analysis by probability quartile."""

    mode: bool = setting(False, SWITCH, f"{_TRAINER}.quartile_analysis_mode")
    """Analyse the gradient by token probability."""
    every: int = setting(50, integer(1), f"{_TRAINER}.quartile_analysis_every")
    """Analyse at the steps where (global_step - 1) % every is 0: 1, 51, 101, ..."""
    split: str = setting("quantile", one_of("quantile", "range"), f"{_TRAINER}.quartile_analysis_split")
    """``quantile``: four parts of equally many tokens; equally probable tokens stay together, so a part may be empty.
    ``range``: quarters of the probabilities from 0 to 1."""
    num_tokens: int = setting(64, integer(0), f"{_TRAINER}.quartile_analysis_num_tokens")
    """Tokens whose own gradient is measured, one backward each, equally many of each quartile; 0: none."""
    exit_after = False  # no setting: training always goes on


S = TypeVar("S", BucketSettings, QuartileSettings)


def read_if_on(settings: type[S], config: Any) -> S | None:
    """Return the settings of an analysis, see :func:`~..checks.read_from_trainer`; None while it is off."""
    values = read_from_trainer(settings, config)
    return values if values.mode else None


Analyses = tuple[BucketSettings | None, QuartileSettings | None]
"""The settings of both analyses; None for one that is off."""
_BLOCKS: dict[str, Any] = {"buckets": BucketSettings, "quartiles": QuartileSettings}
_ONLY_VERL = ("mode", "exit_after", "env_groups", "group_size")
"""Settings that only runs of verl have."""


def taken_from(blocks: dict[str, Any]) -> Analyses:
    """Take ``buckets`` and ``quartiles`` out of the blocks of a run that is not verl's, and read them.

    Args:
        blocks: settings by block. A block is True for the defaults, settings by name, or None or False for off.

    Raises:
        ValueError: one sentence, for a wrong name or value.
    """
    found = []
    for block, kind in _BLOCKS.items():
        given = blocks.pop(block, None)
        require(given is None or isinstance(given, bool | Mapping), block, "true, false, or settings by name", given)
        keys = {each.name: each.metadata["key"] for each in fields(kind) if each.name not in _ONLY_VERL}
        chosen = dict(given) if isinstance(given, Mapping) else {}
        for name in chosen:
            require(name in keys, f"a setting of {block}", f"one of {', '.join(keys)}", name)
        try:
            found.append(None if given in (None, False) else kind(mode=True, **chosen))
        except ValueError as error:  # settings say their names as verl has them
            name = next(name for name, key in keys.items() if key in str(error))
            raise ValueError(str(error).replace(keys[name], f"{block}.{name}")) from None
    return found[0], found[1]


def check_geometry(settings: BucketSettings, config: Any, num_prompts: int) -> None:
    """Refuse a separate analysis batch that cannot be drawn from so many prompts or dealt out to the ranks evenly."""
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
    """Refuse a separate analysis batch where a trainer cannot have one, with the reason in brackets."""
    for name in ("env_groups", "group_size"):
        value = getattr(settings, name)
        require(value is None, f"{_TRAINER}.gradient_analysis_{name}", f"null here ({because})", value)


def geometry(settings: BucketSettings, config: Any) -> tuple[int, int]:
    """Return the numbers of prompts and of rollouts per prompt of the separate analysis batch."""
    groups = settings.env_groups or config.data.train_batch_size
    return groups, settings.group_size or config.actor_rollout_ref.rollout.n
