# SPDX-License-Identifier: Apache-2.0
"""Scenarios of actions: on the same culprit in every epoch, and in a run whose spikes grow from step to step."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tests.world.harness import LetOut, local_of, make_batch, make_trainer
from tests.world.spikes import ON, answer, plant

ACTOR = "actor_rollout_ref.actor"
SMALL = [
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.policy_loss.loss_mode=gpg",  # no ratio that could clip the culprit away
]
ONE_STEP = [*SMALL, f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1"]

Plant = tuple[int, int, float]
"""Row, response position and advantage."""


def train_epochs(
    overrides: list[str],
    dump_dir: str,
    lets_out: bool,
    layout: Sequence[str] = (),
    plants: Sequence[Plant] = ((6, 2, -1e4),),
    answered: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """Two epochs of two mini-batches with a culprit in one, beside the same training without localization.

    ``lets_out``: the latter trains as if nothing flowed back through the culprits. ``layout``: settings of both.
    ``answered``: response positions [first, end) that a tool has written.
    """

    def train(settings: list[str], lets_out: bool) -> tuple[dict[str, Any], tuple[str, bytes]]:
        batch = make_batch(8)
        if answered is not None:
            answer(batch, *answered)
        for each in plants:
            plant(batch, *each)
        trainer = make_trainer([*SMALL, *layout, *settings], dump_dir, dropout=dropout)
        with trainer.letting_out(LetOut(plants, batch)) if lets_out else nullcontext():
            out = trainer.update(batch)
        return out, (trainer.weights_hash(), torch.get_rng_state().numpy().tobytes())

    out, ours = train(ON + overrides, False)
    _, theirs = train([], lets_out)
    events, norms = out["events"], out["metrics"]["actor/grad_norm"][0]
    return {
        "is_same": ours == theirs,
        "metrics": {name: values for name, values in out["metrics"].items() if name.startswith("gradloc/")},
        "events": len(events),
        "norm_taken": norms[events[0]["step"]["mini_batch"]] if events else None,
    }


def train_past_a_large_update(overrides: list[str], dump_dir: str, layout: Sequence[str] = ()) -> dict[str, Any]:
    """Three steps, the second at a learning rate a thousand times too large; and the same without localization."""

    def train(settings: list[str]) -> tuple[list[Any], tuple[str, bytes], list[float]]:
        trainer = make_trainer([*ONE_STEP, *layout, *settings], dump_dir, dropout=0.1)
        groups, events, norms = trainer.optimizer.param_groups, [], []
        for step in range(3):
            for group in groups:
                group["lr"] = 1.0 if step == 1 else 1e-3
            out = trainer.update(make_batch(8, seed=step))
            events += out["events"]
            norms += out["metrics"]["actor/grad_norm"][0]
        return events, (trainer.weights_hash(), torch.get_rng_state().numpy().tobytes()), norms

    (_, theirs, stock), (events, ours, norms) = train([]), train(ON + overrides)
    faults = [(event["step"]["global_step"], event["fault"]) for event in events]
    return {"is_same": ours == theirs and norms == stock, "faults": faults, "norms": norms}


# ---- a run whose spikes grow from step to step, beside its healthy twin

NUM_BEFORE, NUM_GROWING, NUM_AFTER = 18, 8, 2  # the warm-up is of 16
_ROW, _POSITION, _OLD_LOG_PROB = 6, 2, -3.0  # so far above the current one that PPO never clips its loss away


def collapse(mode: str, growth: float, dump_dir: str) -> dict[str, Any]:
    """Two mini-batches a step; one token's advantage grows by a factor from step to step, then all is well again.

    Args:
        mode: of ``gradloc.action``; "healthy" is the twin, in which nothing grows.
        growth: of the advantage, from one step to the next.
        dump_dir: for events.

    Returns:
        ``weights``: this rank's shards, flat, at the start and at the end; ``steps``: each step's
        number of spikes and its norm over the threshold, on rank 0.
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
        steps.append([metrics.get(f"gradloc/{name}", [None])[0] for name in ("spikes", "norm_over_threshold")])
    return {"weights": (start, _weights(trainer)), "steps": steps}


def _weights(trainer: Any) -> torch.Tensor:
    return torch.cat([local_of(param).flatten().clone() for param in trainer.module.parameters()])
