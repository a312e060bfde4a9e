# SPDX-License-Identifier: Apache-2.0
"""Spikes of every kind in verl's actor: what each event must say is in tests/verl_actor/test_verdicts.py."""

import math

import torch

from tests.world.harness import make_batch, make_trainer
from tests.world.spikes import ON, plant

NUM_HEALTHY = 5  # updates before the spike: a history of the batch's scale
TWELVE = [(row, 1 + row % 3, 1e4 if row % 2 else -8e3) for row in range(12)]
OPPOSITE = [(4, 0, 1e4), (4, 4, -1e4)]


def spike(kind: str, overrides: list[str], dump_dir: str) -> None:
    """One update with a spike of this kind; its event is on disk."""
    trainer = make_trainer(ON + overrides, dump_dir)
    batch = make_batch()
    if kind == "weight":
        shard = trainer.actor.actor_module.model.layers[1].mlp.up_proj.weight
        with torch.no_grad():
            getattr(shard, "_local_tensor", shard)[0, 0] = math.nan
    elif kind == "padding":
        batch.batch["advantages"][(batch.batch["response_mask"] == 0).nonzero(as_tuple=True)] = math.nan
    elif kind == "scale":
        for seed in range(1, 1 + NUM_HEALTHY):
            trainer.update(make_batch(seed=seed))
        batch.batch["advantages"] *= 1e4
    elif kind == "sequence":
        batch.batch["advantages"][3] *= 1e4
    plants = {"token": [(5, 3, 1e4)], "opposite": OPPOSITE, "twelve": TWELVE}.get(kind, [])
    for row, position, advantage in plants:
        plant(batch, row, position, advantage)
    trainer.update(batch)
