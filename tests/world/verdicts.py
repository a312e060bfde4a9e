# SPDX-License-Identifier: Apache-2.0
"""Spikes of every kind in verl's actor: what each event must say is in tests/adapters/conformance/test_verdicts.py."""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist

from tests.toy_model.routers import AddLoss, Overflow
from tests.world.harness import NUM_PROMPT, NUM_RESPONSE, lines_of, make_batch, make_trainer, part
from tests.world.settings import require
from tests.world.spikes import ON, plant

NUM_HEALTHY = 5  # updates before the spike: a history of the batch's scale
BROKEN_ROW, BROKEN_FROM = 6, 4
REPLICAS = ("replicas", "replicas alike")
"""Kinds whose replicas' weights have parted, or not; of both a token is planted."""
SPOILED = "model.layers.1.mlp.up_proj.weight"


def spike(kind: str, overrides: list[str], dump_dir: str) -> None:
    """One update with a spike of this kind; its event is on disk."""
    has_experts = kind in ("experts", "experts and a token")
    trainer = make_trainer(ON + overrides + ["experts=qwen3_moe"] * has_experts, dump_dir)
    require(trainer.trains_padding or kind != "padding", "nothing flows back through padding")
    if has_experts:
        require(trainer.has_logits, "the routers' loss is added to logits, which it never has")
        add_router_loss(trainer.module, 1e4 if kind == "experts" else 1e-3)
    batch = make_batch()
    if kind in ("token", "experts and a token", *REPLICAS):
        plant(batch, 5, 3, 1e4)
    if kind == "replicas":
        part_replicas(trainer.module)
    if kind == "not sampled":  # the loss takes the rollout's log-prob for the old one
        plant(batch, 5, 3, -1e-3)
        batch.batch["old_log_probs"][5, 3] = -21.0
        batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    elif kind == "weight":
        spoil_weight(trainer.module)
    elif kind == "padding":
        batch.batch["advantages"][(batch.batch["response_mask"] == 0).nonzero(as_tuple=True)] = math.nan
    elif kind == "scale":
        for seed in range(1, 1 + NUM_HEALTHY):
            trainer.update(make_batch(seed=seed))
        batch.batch["advantages"] *= 1e4
    elif kind in ("forward", "backward"):
        break_row(trainer.module, batch.batch["input_ids"][BROKEN_ROW], kind)
    elif kind == "transient":
        corrupt_once(trainer)
    trainer.update(batch)


def norm_without_router_loss(overrides: list[str], dump_dir: str) -> float:
    """The gradient norm of the batch of ``experts`` without the routers' loss, and so without a spike."""
    trainer = make_trainer([*overrides, "experts=qwen3_moe"], dump_dir)
    return trainer.update(make_batch())["metrics"]["actor/grad_norm"][0][0]


def spoil_weight(module: torch.nn.Module, value: float = math.nan) -> None:
    """One weight of the second layer's ``up_proj``, a NaN by default, on every rank that holds a part of it."""
    named_shards = part("core.sharding").named_shards
    with torch.no_grad():
        for name, param in module.named_parameters():
            for of, shard in named_shards(name, param):
                if of == SPOILED and shard.numel():
                    shard.view(-1)[0] = value


def part_replicas(module: torch.nn.Module) -> None:
    """The last rank has another weight, as after a step of 1e-3 that the others did not take."""
    if dist.get_rank() == dist.get_world_size() - 1:
        spoil_weight(module, 1e-3)


def trains_on_parted_replicas(overrides: list[str], dump_dir: str, is_parted: bool = True) -> dict[str, Any]:
    """Three updates, of which the last has a spike in one rank's rows alone: what was told, and how many events."""
    trainer = make_trainer(ON + overrides, dump_dir)
    if is_parted:
        part_replicas(trainer.module)
    batches = [make_batch(seed=seed) for seed in range(3)]
    plant(batches[-1], 5, 3, 1e4)
    with lines_of(part("loop.localizer").__name__, logging.ERROR) as told:
        events = [len(trainer.update(batch)["events"]) for batch in batches]
    return {"told": told, "events": events}


def add_router_loss(model: torch.nn.Module, factor: float) -> None:
    """transformers' load-balancing loss of all routers, times a factor, as part of the gradient."""

    def add(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.logits = AddLoss.apply(output.logits, factor * output.aux_loss)
        return output

    getattr(model, "_fsdp_wrapped_module", model).register_forward_hook(add)


def break_row(module: torch.nn.Module, row: torch.Tensor, way: str) -> None:
    """Spoil one row of the batch: ``forward``, the last layer gives NaN from the response's position ``BROKEN_FROM``
    on; ``backward``, what comes back to the first layer's ``mlp`` overflows.
    """
    module = getattr(module, "_fsdp_wrapped_module", module)
    seen: list[torch.Tensor] = []
    shortest = NUM_PROMPT + NUM_RESPONSE // 2

    def is_row() -> torch.Tensor:
        return (seen[0][:, :shortest] == row[:shortest]).all(-1)

    def note(embedding: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        seen[:] = inputs

    def spoil(part: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if way == "backward":
            return torch.where(is_row()[:, None, None], Overflow.apply(output), output)
        is_late = torch.arange(seen[0].shape[1]) >= NUM_PROMPT - 1 + BROKEN_FROM
        return output.masked_fill((is_row()[:, None] & is_late)[..., None], math.nan)

    module.get_input_embeddings().register_forward_pre_hook(note)
    first_mlp = next(of for name, of in module.named_modules() if name.endswith(".mlp"))
    (module.model.norm if way == "forward" else first_mlp).register_forward_hook(spoil)


def corrupt_once(trainer: Any) -> None:
    """The first gradient has one element that no computation gives: what a failing chip or a race leaves."""
    owner, name = trainer.clips_in
    is_done: list[bool] = []

    def corrupted(*given: Any) -> Any:
        if not is_done:
            is_done.append(True)
            grad = next(param.grad for param in trainer.module.parameters() if param.grad is not None)
            getattr(grad, "_local_tensor", grad).view(-1)[11] = 1e5
        return getattr(type(owner), name)(owner, *given)  # on verl 0.9 another class with the first update

    setattr(owner, name, corrupted)
