# SPDX-License-Identifier: Apache-2.0
"""What a feature needs of a run on every verl."""

from ...checks import Requirement

_ACTOR = "actor_rollout_ref.actor"

WHOLE_SEQUENCES = Requirement(
    f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), 1, "1", "sequence parallelism is not supported yet"
)
SEPARATE_PARAMETERS = Requirement(
    f"{_ACTOR}.fsdp_config.use_orig_params",
    (True,),
    False,
    "true with strategy=fsdp",
    "FSDP1 merges a layer's parameters into one without it",
)
ROLLOUT_LOG_PROBS = Requirement(
    "actor_rollout_ref.rollout.calculate_log_probs",
    (True,),
    False,
    "true",
    "its weights come from the rollout's log-probs",
)
