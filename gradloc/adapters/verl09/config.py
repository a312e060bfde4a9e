# SPDX-License-Identifier: Apache-2.0
"""The actor's config with GradLoc's settings: what ``+gradloc=on`` puts into ``actor_rollout_ref.actor._target_``.

verl builds it in each worker before the engine: so this is where a plug-in that was not loaded is missed.
"""

import inspect
import sys
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, ClassVar

from verl.workers.config import FSDPActorConfig, McoreActorConfig, RolloutConfig
from verl.workers.engine.fsdp import transformer_impl

from ...analysis.config import BucketSettings
from ...checks import SEARCHABLE, Requirement, check_requirements, keys_in
from ...config import GradLocConfig, settle
from ...rollout_filter.config import FilterSettings
from ..verl_common import needs
from ..verl_common.needs import (
    ACTOR,
    BUCKETS,
    CHECKPOINTED_OFFLOAD,
    FSDP,
    LOPTI,
    NO_OFFLOAD,
    QUARTILES,
    RATIO_CLIPS,
    STABILIZE,
    WHOLE_SEQUENCES,
    features_on,
    only,
)
from .touches import check_verl

_SPIKES = f"{ACTOR}.gradloc.enable"
_FILTER = "actor_rollout_ref.rollout.rollout_filter_value"
_NO_DERIVATIVE = "its gradient is not the derivative of its forward"
_V1 = only("trainer.use_v1", True, "it hangs on the V1 trainers")
_FSDP_OR_MEGATRON = replace(FSDP, allowed=(*FSDP.allowed, "megatron"), expected="fsdp, fsdp2 or megatron")
_GROUPER = only(f"{ACTOR}.use_prefix_grouper", False, "its forward is another one")
_ENGINE = (
    _V1,
    *(_GROUPER,) * ("prefix_grouper" in inspect.getsource(transformer_impl)),  # up to 0.9.1 the V1 trainers ignore it
    only(f"{ACTOR}.qat.enable", False, _NO_DERIVATIVE),
    only(f"{ACTOR}.fsdp_config.qat.enable", False, _NO_DERIVATIVE),
)
_ESTIMATORS = ("kl", "k1", "mse", "k2", "low_var_kl", "k3")  # the gradient of "abs" says nothing of the distance
_LOSS = "distillation.distillation_loss"
_OF_LOG_PROBS = (
    Requirement(f"{_LOSS}.loss_mode", _ESTIMATORS, "k3", "one of k1, k2, k3", "top-k losses read logits"),
    only(f"{_LOSS}.use_task_rewards", False, "no search was run on the sum of both losses"),
)
_DISTILLED = tuple(replace(need, only_with="distillation.enabled") for need in _OF_LOG_PROBS)
_OF_REWARDS = only("distillation.enabled", False, "it is about the loss on rewards")
_WHOLE_SEQUENCES = (
    WHOLE_SEQUENCES,
    replace(WHOLE_SEQUENCES, key=f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
)
_MEAN = Requirement(
    f"{ACTOR}.loss_agg_mode",
    ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "token-mean",
    "one of verl's means",
    "its parts are parts of a mean",
)
_IN_ORDER = only(f"{ACTOR}.shuffle", False, "the trainer must know which mini-batch a row is in")
_NEEDS = {
    **needs.NEEDS,
    _SPIKES: (_FSDP_OR_MEGATRON, *_ENGINE, *_DISTILLED, _IN_ORDER, CHECKPOINTED_OFFLOAD, *SEARCHABLE),
    STABILIZE: (_FSDP_OR_MEGATRON, *_ENGINE, *_DISTILLED, *_WHOLE_SEQUENCES),
    RATIO_CLIPS: (*needs.NEEDS[RATIO_CLIPS], _OF_REWARDS),
    LOPTI: (FSDP, *_ENGINE, _OF_REWARDS),
    **dict.fromkeys((BUCKETS, QUARTILES), (FSDP, *_ENGINE, _OF_REWARDS, NO_OFFLOAD, *_WHOLE_SEQUENCES, _MEAN)),
    _FILTER: (_V1,),
}
_MEGATRON = f"{ACTOR}.megatron"
_ON_CPU = Requirement(
    f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
    (True,),
    False,
    "true",
    "no search was run with TransformerEngine's precision-aware optimizer",
)
_PRECISION_AWARE = (
    f"{ACTOR}.optim.use_precision_aware_optimizer",
    f"{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer",
)
_MEGATRON_NEEDS = (
    *(replace(_ON_CPU, only_with=switch) for switch in _PRECISION_AWARE),
    *(
        only(key, value, "no search was run with it on Megatron")
        for key, value in {
            f"{_MEGATRON}.dynamic_context_parallel": False,
            f"{_MEGATRON}.use_megatron_fsdp": False,
            f"{_MEGATRON}.router_replay.mode": "disabled",
            f"{_MEGATRON}.dtype": "bfloat16",
            f"{ACTOR}.optim.optimizer": "adam",
            "actor_rollout_ref.model.lora.rank": 0,
            "actor_rollout_ref.model.lora_rank": 0,
            "actor_rollout_ref.model.mtp.enable": False,
        }.items()
    ),
    only(f"{_MEGATRON}.qat.enable", False, _NO_DERIVATIVE),
    only(f"{ACTOR}.gradloc.evidence.checkpoint", "off", "weights are saved in FSDP's format alone"),
)
_ONE_STAGE = only(
    f"{_MEGATRON}.pipeline_model_parallel_size", 1, "the first stage has no log-probs to tell the clips of"
)


def check_features(config: Any, settings: GradLocConfig, alpha: float, lopti: Any, analysis: Any) -> bool:
    """Refuse a run in which a feature of the actor's update that is on could not work.

    Args:
        config: the trainer's whole config.
        settings: those that hold.
        alpha: Advantage Reweighting's.
        lopti: None while it is off.
        analysis: the analyses and the rollout filter; None while all are off.

    Returns:
        Whether any feature is on.

    Raises:
        ValueError: one sentence.
    """
    is_on = {
        LOPTI: lopti is not None,
        BUCKETS: analysis is not None and analysis.buckets is not None,
        QUARTILES: analysis is not None and analysis.quartiles is not None,
        _FILTER: analysis is not None,
    }
    strategy = config.actor_rollout_ref.actor.strategy
    features = [*features_on(settings, strategy, _SPIKES), *(feature for feature, on in is_on.items() if on)]
    for feature in features:
        check_requirements(feature, _NEEDS[feature], config)
    if alpha:
        check_requirements("algorithm.advantage_reweighting.alpha", (_OF_REWARDS,), config)
    if features and strategy == "megatron":
        check_requirements("gradloc", _MEGATRON_NEEDS, config)
        if RATIO_CLIPS in features:
            check_requirements(RATIO_CLIPS, (_ONE_STAGE,), config)
    return bool(features)


def check_critic(config: Any) -> None:
    """Refuse a run in which spikes of the critic could not be localized: one sentence, a ValueError."""
    check_verl("trainer")
    keys = "critic.fsdp.ulysses_sequence_parallel_size", "critic.fsdp.offload_policy"
    needs.check_critic(config, *keys, _V1, replace(_IN_ORDER, key="critic.shuffle"))


_OF_ROLLOUT = [
    (key.rpartition(".")[2], Any, getattr(settings, name))
    for settings in (BucketSettings, FilterSettings)
    for name, key in keys_in(settings).items()
    if key.startswith("actor_rollout_ref.rollout.")
]
GradLocRolloutConfig = make_dataclass(
    "GradLocRolloutConfig", _OF_ROLLOUT, bases=(RolloutConfig,), namespace={"__module__": __name__}
)
"""verl's config of the rollout with the filter's settings and the bucket analysis'; the trainer reads them."""


@dataclass
class _WithSettings:
    """The four published keys (None: not given) and ``gradloc``, in front of verl's config of an actor."""

    spike_detection: bool | None = None
    grad_norm_threshold: float | None = None
    bisect_budget_steps: int | None = None
    bisect_dump_dir: str | None = None
    gradloc: GradLocConfig = field(default_factory=GradLocConfig)
    filter_loss_scaling: str = FilterSettings.loss_scaling
    touched_by: ClassVar[str] = "worker"

    def __post_init__(self):
        super().__post_init__()
        settings = settle(self)
        if not settings.enable and not settings.stabilize.is_on:
            return
        check_verl(self.touched_by)
        if f"{__package__}.plugin" not in sys.modules:
            raise RuntimeError(
                "gradloc is switched on, and its plug-in was not loaded: leave VERL_USE_EXTERNAL_PLUGINS at auto or "
                "name gradloc in it, and install gradloc in the environment of every node (pip install gradloc-verl)."
            )


@dataclass
class GradLocActorConfig(_WithSettings, FSDPActorConfig):
    """Of the FSDP actor."""


@dataclass
class GradLocMegatronActorConfig(_WithSettings, McoreActorConfig):
    """Of the Megatron actor."""

    touched_by: ClassVar[str] = "megatron"


def actor_config(**given: Any) -> _WithSettings:
    """The config of the engine that the run has."""
    return (GradLocMegatronActorConfig if given.get("strategy") == "megatron" else GradLocActorConfig)(**given)
