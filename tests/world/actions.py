# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: the same culprit in every epoch, and what is done with each appearance."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.world.harness import local_of, make_batch, make_trainer
from tests.world.spikes import ON, answer, plant

SMALL = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",  # no ratio that could clip the culprit away
]


TWINS = {"as_without": 0.0, "as_spiked": -1e4}
"""Training without localization that a run is held against, and the advantage of its culprit."""


def train_epochs(
    overrides: list[str], dump_dir: str, twin: str, layout: Sequence[str] = (), answered: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Two epochs of two mini-batches with one culprit, beside its ``twin``.

    ``answered``: response positions [first, end) that a tool has written.
    """

    def train(advantage: float, settings: list[str]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        batch = make_batch(8)
        if answered is not None:
            answer(batch, *answered)
        plant(batch, 6, 2, advantage)
        trainer = make_trainer([*SMALL, *layout, *settings], dump_dir)
        out = trainer.update(batch)
        return out, [local_of(param) for param in trainer.module.parameters()]

    out, ours = train(-1e4, ON + overrides)
    _, theirs = train(TWINS[twin], [])
    events, norms = out["events"], out["metrics"]["actor/grad_norm"][0]
    return {
        "is_same": all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "metrics": {name: values for name, values in out["metrics"].items() if name.startswith("gradloc/")},
        "events": len(events),
        "norm_taken": norms[events[0]["step"]["mini_batch"]] if events else None,
    }
