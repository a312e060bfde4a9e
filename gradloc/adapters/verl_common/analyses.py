# SPDX-License-Identifier: Apache-2.0
"""Gradient analyses and rollout filter of a verl trainer, for every version of verl."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from omegaconf import OmegaConf, open_dict
from ray.exceptions import RayError

from ...analysis.config import check_geometry, geometry
from ...analysis.reporter import AnalysisBatch, AnalysisRun, BucketReporter, QuartileReporter
from ...loop.batch import BatchView
from ...rollout_filter.choose import advantage_scale, kept_groups
from ...rollout_filter.groups import groups_of
from .requirements import BUCKETS, QUARTILES, refuse_pictures
from .trainer import WorkersUpdate

FILLER = -1
"""Value of our tensors in rows that only fill up the ranks."""


class VerlAnalyses:
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    ``settings`` are from :func:`~.requirements.analyses_in`; what is found is written under ``root``.
    """

    update: WorkersUpdate
    """The update of the step that is analysed."""
    afterwards: ExitStack
    """Callbacks to run after the step's analyses."""
    _last_step = 0
    counts: dict[str, float] | None = None
    """Counts of the filter in the step's batch."""

    def __init__(self, config: Any, root: str, settings: tuple):
        buckets, quartiles, self.filter_settings = settings
        self._config, actor = config, config.actor_rollout_ref.actor
        self.trackers: dict[str, Any] = {}
        run = AnalysisRun(
            root=root,
            seed=config.data.get("seed") or 0,
            trackers=self.trackers,
            names={"project": config.trainer.project_name, "experiment": config.trainer.experiment_name},
            loss={
                "loss_mode": actor.policy_loss.get("loss_mode", "vanilla"),
                "loss_agg_mode": actor.loss_agg_mode,
                "adv_estimator": str(config.algorithm.adv_estimator),
            },
            vital=(RayError,),
        )
        self.quartiles = None if quartiles is None else QuartileReporter(quartiles, run)
        self.buckets = None if buckets is None else BucketReporter(buckets, run, self._separate)

    def check_data(self, num_prompts: int) -> None:
        """Refuse a batch that needs more prompts than these, by :func:`~...analysis.config.check_geometry`."""
        if self.buckets is not None:
            check_geometry(self.buckets.settings, self._config, num_prompts)

    @staticmethod
    def prepare(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
        """Roll out and score a batch that is not trained on, inside a step, of prompts that are drawn by this seed.

        The rollout draws from the sampler like any other. Returns verl's batch with advantages, filtered as training
        batches are.
        """
        raise NotImplementedError

    def view(self, update: WorkersUpdate) -> BatchView:
        """Return the rows of an analysis."""
        return update.view()

    def ask(
        self, update: WorkersUpdate, tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Have the workers analyse the batch, as :class:`~...analysis.reporter.AnalysisBatch` says."""
        raise NotImplementedError

    def kept_rows(self, uids: Any, scores: torch.Tensor, mask: torch.Tensor, num_ranks: int, metrics: dict) -> Any:
        """Return the rows of the groups that the filter keeps, bool (R,); None for all. Adds to the metrics.

        Args:
            uids: each row's prompt.
            scores: (R, T) token-level rewards.
            mask: (R, T) of the responses.
            num_ranks: what the number of rows must be a multiple of.
            metrics: of the step; ``rollout/*`` is added.
        """
        groups = groups_of(uids, scores, mask)
        choice = kept_groups(groups, self.filter_settings, num_ranks, metrics)
        if choice is None:
            return None
        kept, self.counts = choice
        return None if len(kept) == len(groups) else np.isin(groups.group_of_row, kept)

    def run(self, update: WorkersUpdate, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Scale the filtered batch's advantages just before an actor's update, and analyse if the step is due.

        Of several updates of a step the first is analysed. Adds to the step's metrics and timings; returns whether the
        run is to end here.
        """
        self.scale_advantages(update)
        if update.trainer.global_steps == self._last_step:
            return False
        self.update, self._last_step = update, update.trainer.global_steps
        with ExitStack() as self.afterwards:
            for feature, reporter in ((QUARTILES, self.quartiles), (BUCKETS, self.buckets)):
                if reporter is None:
                    continue
                batch = partial(self.analysis_batch, update, feature)
                was_due = reporter.run(batch, self._last_step, metrics, timing_raw)
                if was_due and reporter.settings.exit_after:
                    metrics["training/global_step"] = self._last_step
                    metrics["trainer/exited_after_gradient_analysis"] = 1.0
                    metrics["timing_s/gradient_analysis"] = timing_raw["gradient_analysis"]
                    return True
        return False

    def scale_advantages(self, update: WorkersUpdate) -> None:
        """Scale advantages by ``filter_loss_scaling``; where that is 1 the tensor is not replaced."""
        kept_ratio = 1.0 if self.counts is None else self.counts["kept_ratio"]
        factor = advantage_scale(self.filter_settings.loss_scaling, kept_ratio)
        if factor != 1.0:
            (advantages,) = update.get("advantages")
            update.put(advantages=advantages * factor)

    def analysis_batch(self, update: WorkersUpdate, feature: str) -> AnalysisBatch:
        """Return the batch as an analysis sees it; ``feature`` is the setting that switches the analysis on."""
        view = self.view(update)

        def ask(tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
            refuse_pictures(feature, view.labels.get("multi_modal_inputs", ()))
            return self.ask(update, tensors, request)

        return AnalysisBatch(view.tensors, view.labels["uid"], self.counts, ask)

    def _separate(self, seed: int) -> AnalysisBatch:
        """Return a batch of its own for the analysis by bucket."""
        counts, self.counts = self.counts, None
        try:
            training = self.update
            trainer = training.trainer
            batch = self.prepare(trainer, *geometry(self.buckets.settings, trainer.config), seed)
            update = type(training)(trainer, training.workers, batch)
            self.scale_advantages(update)
            return self.analysis_batch(update, BUCKETS)
        finally:
            self.counts = counts


# ---- a batch of its own: verl's training loop, run on one batch and stopped at the advantages. A copy of the trainer
# whose loader holds that batch walks through the loop: rollout, filter, reward, log-probs, values, advantages, whatever
# else is there. Where the loop would learn from the batch, the copy hands it over: nothing of it is written twice.


class _Prepared(Exception):
    """Carries the batch out of the loop."""


def hand_over(batch: Any, metrics: Any = None) -> NoReturn:
    """Leave verl's loop with this batch, in place of the method that would learn from it."""
    raise _Prepared(batch)


def prepared_by(walk: Callable[[], Any]) -> Any:
    """Return the batch that verl's loop hands over."""
    try:
        walk()
    except _Prepared as prepared:
        return prepared.args[0]
    raise RuntimeError("verl's training loop ended without offering its batch to the gradient analysis")


def drawn_prompts(trainer: Any, num_groups: int, seed: int) -> Any:
    """Return this number of prompts as the loader of verl's trainer would hand them over.

    They are drawn with a random generator of their own, so the order of the training data stays what it is.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(trainer.train_dataset), generator=generator)[:num_groups].tolist()
    return trainer.train_dataloader.collate_fn([trainer.train_dataset[index] for index in chosen])


def twin_of(trainer: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of the trainer with changes in its config; it shares the workers."""
    twin = copy.copy(trainer)
    twin.config = copy.deepcopy(trainer.config)
    with open_dict(twin.config):
        for key, value in changes.items():
            OmegaConf.update(twin.config, key, value)
    if hasattr(trainer, "kl_ctrl_in_reward"):
        twin.kl_ctrl_in_reward = copy.deepcopy(trainer.kl_ctrl_in_reward)
    return twin
