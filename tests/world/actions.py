# SPDX-License-Identifier: Apache-2.0
"""Scenarios of actions: on the same culprit in every epoch, and in a run whose spikes grow from step to step."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.world.harness import local_of, make_batch, make_trainer
from tests.world.spikes import ON, answer, plant

ACTOR = "actor_rollout_ref.actor"
SMALL = [
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.policy_loss.loss_mode=gpg",  # no ratio that could clip the culprit away
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


# ---- a run whose spikes grow from step to step, beside its healthy twin

NUM_BEFORE, NUM_GROWING, NUM_AFTER = 18, 8, 2  # the warm-up is of 16
_ROW, _POSITION, _OLD_LOG_PROB = 6, 2, -3.0  # so far above the current one that PPO never clips its loss away
_METRICS = ("spikes", "events", "mask", "skip", "threshold", "norm_over_threshold", "norm_after", "masked_tokens")


def collapse(mode: str, growth: float, dump_dir: str) -> dict[str, Any]:
    """Two mini-batches a step; one token's advantage grows by a factor from step to step, then all is well again.

    Args:
        mode: of ``gradloc.action``; "healthy" is the twin, in which nothing grows.
        growth: of the advantage, from one step to the next.
        dump_dir: for events.

    Returns:
        ``weights``: this rank's shards, flat, at the start and at the end; ``steps``: each step's metrics, on rank 0.
    """
    overrides = [*ON, f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
    overrides += [] if mode == "healthy" else [f"{ACTOR}.gradloc.action.mode={mode}"]
    overrides += [f"{ACTOR}.gradloc.trigger.max_events=0"] * (mode != "mask")  # which alone needs a search
    trainer = make_trainer(overrides, dump_dir)
    start, steps = _weights(trainer), []
    for step in range(NUM_BEFORE + NUM_GROWING + NUM_AFTER):
        batch = make_batch(8, seed=step)
        grown = step - NUM_BEFORE + 1
        batch.batch["old_log_probs"][_ROW, _POSITION] = _OLD_LOG_PROB
        if mode != "healthy" and 0 < grown <= NUM_GROWING:
            plant(batch, _ROW, _POSITION, 10.0 * growth**grown)
        metrics = trainer.update(batch)["metrics"]
        found = {name: metrics[f"gradloc/{name}"][0] for name in _METRICS if f"gradloc/{name}" in metrics}
        steps.append({**found, "norms": metrics["actor/grad_norm"][0], "is_grown": 0 < grown <= NUM_GROWING})
    return {"weights": (start, _weights(trainer)), "steps": steps}


def _weights(trainer: Any) -> torch.Tensor:
    return torch.cat([local_of(param).flatten().clone() for param in trainer.module.parameters()])
