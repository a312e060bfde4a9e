# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: the same culprit in every epoch, and what is done with each appearance."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.world.harness import make_batch, make_trainer
from tests.world.spikes import ON, answer, plant

SMALL = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_epochs=3",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",  # no ratio that could clip the culprit away
]


def train_epochs(
    overrides: list[str], dump_dir: str, layout: Sequence[str] = (), answered: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Three epochs of two mini-batches with one culprit, and the same without it and without localization.

    ``answered``: response positions [first, end) that a tool has written.
    """
    trained = []
    for advantage, settings in ((-1e4, ON + overrides), (0.0, []), (-1e4, [])):
        batch = make_batch(8)
        if answered is not None:
            answer(batch, *answered)
        plant(batch, 6, 2, advantage)
        trainer = make_trainer([*SMALL, *layout, *settings], dump_dir)
        out = trainer.update(batch)
        params = [param.detach() for param in trainer.module.parameters()]
        trained.append([param.to_local() if hasattr(param, "to_local") else param for param in params])
        if settings:
            metrics = {name: values for name, values in out["metrics"].items() if name.startswith("gradloc/")}
            norms = out["metrics"]["actor/grad_norm"][0]
            events = out["events"]
    ours, without, spiked = trained
    return {
        "as_without": all(torch.equal(a, b) for a, b in zip(ours, without, strict=True)),
        "as_spiked": all(torch.equal(a, b) for a, b in zip(ours, spiked, strict=True)),
        "metrics": metrics,
        "events": len(events),
        "norm_taken": norms[events[0]["step"]["mini_batch"]] if events else None,
    }
