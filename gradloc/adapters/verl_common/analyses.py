# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter of a trainer of verl's, whatever its version keeps batches in."""

from collections.abc import Iterable
from typing import Any

from ray.exceptions import RayError

from ...analysis.analyses import Analyses
from ...analysis.config import BucketSettings, QuartileSettings, read_buckets, read_quartiles
from ...analysis.reporter import Batch, Run
from ...rollout_filter.config import FilterSettings, read_filter

FILLER = -1
"""What a tensor of ours holds in rows that only fill up the ranks."""


def analyses_in(config: Any) -> tuple[BucketSettings | None, QuartileSettings | None, FilterSettings] | None:
    """The settings of both analyses, None for one that is off, and of the rollout filter; None while all are off.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    buckets, quartiles, chosen = read_buckets(config), read_quartiles(config), read_filter(config)
    return None if buckets is None and quartiles is None and chosen.keeps_all else (buckets, quartiles, chosen)


class VerlAnalyses(Analyses):
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    Args:
        config: the trainer's whole config.
        root: where to write, absolute.
        settings: from :func:`analyses_in`.
    """

    def __init__(self, config: Any, root: str, settings: tuple):
        buckets, quartiles, self.chosen = settings
        super().__init__(_run_of(config, root), buckets, quartiles, self._separate)

    def _separate(self, seed: int) -> Batch:
        """A batch for the analysis by bucket that no update will see."""
        raise NotImplementedError


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
