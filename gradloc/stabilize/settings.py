# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What the stabilizers need of the rest of a run's config."""

from typing import Any

from omegaconf import OmegaConf

__all__ = ["NEEDS_ROLLOUT_LOG_PROBS", "check_whole_config"]

NEEDS_ROLLOUT_LOG_PROBS = (
    "actor_rollout_ref.actor.gradloc.stabilize.token_clip and seq_clip need the rollout's log-probs, found none: set "
    "actor_rollout_ref.rollout.calculate_log_probs=true, or both modes to off."
)


def check_whole_config(config: Any) -> bool:
    """Whether any stabilizer is on; refuses a run in which it could not work.

    Args:
        config: the trainer's whole config, as Hydra composed it.

    Raises:
        ValueError: one sentence that names the key and what to set.
    """
    actor = config.actor_rollout_ref.actor
    if OmegaConf.select(actor, "gradloc.stabilize") is None:  # another trainer's config
        return False
    from verl.utils.config import omega_conf_to_dataclass

    stabilize = omega_conf_to_dataclass(actor.gradloc.stabilize)
    if not stabilize.is_on:
        return False
    if config.trainer.get("use_legacy_worker_impl", "auto") == "disable":
        raise ValueError(
            "actor_rollout_ref.actor.gradloc.stabilize needs verl's FSDP workers, found "
            "trainer.use_legacy_worker_impl=disable (the engine workers): set it to auto, or every stabilizer to off."
        )
    if stabilize.weighs_tokens and not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
        raise ValueError(NEEDS_ROLLOUT_LOG_PROBS)
    return True
