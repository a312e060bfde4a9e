# SPDX-License-Identifier: Apache-2.0
"""What verl's FSDP worker calls around the actor's update."""

from typing import Any

from verl import DataProto
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from ...keys import POLICY_KEY
from ..verl_common.reports import answer
from .analysis_actor import RECORD_KEY, analyze
from .critic import WatchedCritic


def keeps_lr_schedule(data: DataProto) -> bool:
    """Whether this update is followed by another one of the same step: Lopti's first stage."""
    policy = data.meta_info.get(POLICY_KEY)
    return policy is not None and policy.keeps_lr_schedule


def analyze_gradients(worker: Any, data: DataProto) -> DataProto:
    """Split the gradient of this rank's rows by bucket and loss term, or by probability quartile; the actor of verl's
    ``ActorRolloutRefWorker`` stays as it was. What was measured comes among the metrics."""
    if worker._is_offload_param:
        load_fsdp_model_to_gpu(worker.actor_module_fsdp)
    with worker.ulysses_sharding_manager:
        record = analyze(worker.actor, data.to("cpu"))
    if worker._is_offload_param:
        offload_fsdp_model_to_cpu(worker.actor_module_fsdp)
    return DataProto(meta_info={"metrics": {RECORD_KEY: record}})


def watch_critic(worker: Any) -> DataProto:
    """Before the first update: have the critic of verl's ``CriticWorker`` be ours."""
    worker.critic.__class__ = WatchedCritic
    return answer(None)


def report_of_actor(worker: Any) -> DataProto:
    """What verl's ``ActorRolloutRefWorker`` has to say of the last update."""
    return answer(worker.actor.gradloc.report())


def report_of_critic(worker: Any) -> DataProto:
    """Likewise verl's ``CriticWorker``."""
    return answer(worker.critic.report())
