# SPDX-License-Identifier: Apache-2.0
"""`harness.train` with two ranks to a sequence."""

from typing import Any

from tests.world.models.ulysses import attention_of_verl

from .harness import train

SIZE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def train_in_parallel(overrides: list[str], **settings: Any) -> dict[str, Any]:
    """See :func:`harness.train`."""
    with attention_of_verl():
        return train([*overrides, f"{SIZE}=2"], **settings)
