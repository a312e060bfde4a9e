# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter of a trainer of verl's, whatever its version keeps batches in."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from omegaconf import OmegaConf, open_dict
from ray.exceptions import RayError

from ...analysis.actor import cut_runs
from ...analysis.analyses import Analyses
from ...analysis.config import BucketSettings, QuartileSettings, geometry, read_if_on
from ...analysis.reporter import Batch, Run
from ...rollout_filter.choose import advantage_scale
from ...rollout_filter.config import FilterSettings, read_filter
from .losses import aggregation_of
from .needs import BUCKETS

FILLER = -1
"""What a tensor of ours holds in rows that only fill up the ranks."""


def analyses_in(config: Any) -> tuple[BucketSettings | None, QuartileSettings | None, FilterSettings] | None:
    """The settings of both analyses, None for one that is off, and of the rollout filter; None while all are off.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    buckets, quartiles = read_if_on(BucketSettings, config), read_if_on(QuartileSettings, config)
    chosen = read_filter(config)
    return None if buckets is None and quartiles is None and chosen.keeps_all else (buckets, quartiles, chosen)


class VerlAnalyses(Analyses):
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    ``settings`` are from :func:`analyses_in`; what is found is written under ``root``.
    """

    trainer: Any = None
    """verl's, of the step that is analysed."""
    counts: dict[str, float] | None = None
    """What the filter did with the step's batch."""

    def __init__(self, config: Any, root: str, settings: tuple):
        buckets, quartiles, self.chosen = settings
        super().__init__(_run_of(config, root), buckets, quartiles, self._separate)

    @staticmethod
    def prepare(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
        """Roll out and score a batch that no update will see; the rollout draws from the sampler like any other.

        Args:
            trainer: verl's, inside a step.
            num_groups: prompts.
            group_size: rollouts per prompt.
            seed: of the prompts' draw; one per step.

        Returns:
            verl's batch with advantages, filtered as training batches are.
        """
        raise NotImplementedError

    def scale_advantages(self, batch: Any) -> None:
        """As ``filter_loss_scaling`` says; where that changes nothing they stay the very same tensor."""
        raise NotImplementedError

    def seen(self, batch: Any, feature: str) -> Batch:
        """verl's batch as an analysis sees it; ``feature`` is the setting that switches that on."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """The factor on a filtered batch's advantages."""
        return advantage_scale(self.chosen.loss_scaling, 1.0 if self.counts is None else self.counts["kept_ratio"])

    def _separate(self, seed: int) -> Batch:
        """A batch of its own for the analysis by bucket."""
        counts, self.counts = self.counts, None
        try:
            batch = self.prepare(self.trainer, *geometry(self.buckets.settings, self.trainer.config), seed)
            self.scale_advantages(batch)
            return self.seen(batch, BUCKETS)
        finally:
            self.counts = counts


class VerlAnalysed:
    """What the analyses may ask of a model, see :class:`~...analysis.actor.Actor`, as far as every verl has it alike.

    Args:
        config: verl's actor config.
        scaler: of fp16; None without.
    """

    def __init__(self, config: Any, scaler: Any):
        self._config, self._scaler = config, scaler
        optional = {"entropy": config.entropy_coeff != 0, "kl": bool(config.use_kl_loss)}
        self.terms = ("task", *(name for name, is_on in optional.items() if is_on))

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def runs(self, lengths: torch.Tensor) -> list[list[int]]:
        config = self._config
        num_tokens = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        return cut_runs(lengths, num_tokens, config.ppo_micro_batch_size_per_gpu)

    def aggregation(self, term: str) -> str:
        return aggregation_of(self._config) if term == "task" else self._config.loss_agg_mode


def _run_of(config: Any, root: str) -> Run:
    actor = config.actor_rollout_ref.actor
    return Run(
        root=root,
        seed=config.data.get("seed") or 0,
        trackers={},
        names={"project": config.trainer.project_name, "experiment": config.trainer.experiment_name},
        loss={
            "loss_mode": actor.policy_loss.get("loss_mode", "vanilla"),
            "loss_agg_mode": actor.loss_agg_mode,
            "adv_estimator": str(config.algorithm.adv_estimator),
        },
        vital=(RayError,),
    )


def refuse_pictures(feature: str, inputs: Iterable[Any]) -> None:
    """Refuse inputs that an analysis does not know.

    Args:
        feature: the setting that switches it on.
        inputs: of each row, what there is beside text; of a text-only run verl's agent loop gives an empty dict.

    Raises:
        ValueError: one sentence.
    """
    if any(inputs):
        raise ValueError(f"{feature} does not take batches with multi_modal_inputs yet: switch it off.")


def checked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks measured.

    Raises:
        RuntimeError: a rank failed.
    """
    for record in records:
        if "error" in record:
            raise RuntimeError(record["error"])
    return records


# ---- a batch of its own: verl's training loop, run on one batch and stopped at the advantages. A copy of the trainer
# whose loader holds that batch walks through the loop: rollout, filter, reward, log-probs, values, advantages, whatever
# else is there. Where the loop would learn from the batch, the copy hands it over: nothing of it is written twice.


class _Prepared(Exception):
    """Carries the batch out of the loop."""


def hand_over(batch: Any, metrics: Any = None) -> NoReturn:
    """In the place of verl's method that learns from the batch."""
    raise _Prepared(batch)


def prepared_by(walk: Callable[[], Any]) -> Any:
    """The batch that verl's loop hands over."""
    try:
        walk()
    except _Prepared as prepared:
        return prepared.args[0]
    raise RuntimeError("verl's training loop ended without offering its batch to the gradient analysis")


def drawn_prompts(trainer: Any, num_groups: int, seed: int) -> Any:
    """So many prompts as the loader of verl's trainer would hand them over.

    They are drawn with a random generator of their own, so the order of the training data stays what it is.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(trainer.train_dataset), generator=generator)[:num_groups].tolist()
    return trainer.train_dataloader.collate_fn([trainer.train_dataset[index] for index in chosen])


def twin_of(trainer: Any, changes: dict[str, Any]) -> Any:
    """The trainer with a config of its own, in which this is changed; it shares the workers."""
    twin = copy.copy(trainer)
    twin.config = copy.deepcopy(trainer.config)
    with open_dict(twin.config):
        for key, value in changes.items():
            OmegaConf.update(twin.config, key, value)
    if hasattr(trainer, "kl_ctrl_in_reward"):
        twin.kl_ctrl_in_reward = copy.deepcopy(trainer.kl_ctrl_in_reward)
    return twin
