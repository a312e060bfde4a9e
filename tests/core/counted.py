# SPDX-License-Identifier: Apache-2.0
"""A spike in transformers' own model on a simulated device: what training and the search of it take, in bytes."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.config import EvidenceConfig, GradLocConfig
from gradloc.core import memory
from gradloc.core.gradients import GradientSpace
from gradloc.core.memory_plans import MemoryNeed
from gradloc.core.ranks import Ranks
from gradloc.loop.localizer import Localizer
from gradloc.loop.messages import Policy
from tests.core.card import Card
from tests.toy_model import ToyStep, ToyTrainer, clip_gradient
from tests.toy_model.batch import Batch

_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Reads(torch.nn.Module):
    """transformers' model, called as :class:`ToyStep` calls one."""

    def __init__(self, config: dict[str, Any], is_checkpointed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.of = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa")
        self.of.train()
        if is_checkpointed:
            self.of.gradient_checkpointing_enable({"use_reentrant": False})

    head = property(lambda self: self.of.lm_head)
    blocks = property(lambda self: self.of.model.layers)

    def forward(self, tokens: torch.Tensor, num_last: int, precise: bool = False) -> torch.Tensor:
        hidden = self.of.model(tokens, use_cache=False).last_hidden_state[:, -num_last:]
        if precise:
            return torch.nn.functional.linear(hidden.float(), self.head.weight.float())
        return self.head(hidden)


def sharded(model: Reads, layout: str, dtype: torch.dtype) -> torch.nn.Module:
    """As verl and TRL lay it out: ``plain``, ``ddp``, ``fsdp1``, ``fsdp2``, or ``hsdp`` over pairs."""
    if layout == "plain":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        return FSDP1(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            mixed_precision=precision,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    size = dist.get_world_size()
    shape = (size // 2, 2) if layout == "hsdp" else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in [*model.blocks, *([] if model.of.config.tie_word_embeddings else [model.of.model.embed_tokens])]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch_of(vocabulary: int, rows: int, length: int) -> Batch:
    """Random rows; responses as long as they are."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(2))
    old = torch.full((rows, length), -8.0)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).clone()
    return Batch(tokens, labels, torch.ones(rows, length, dtype=torch.bool), advantages, old, old.clone())


def count(
    config: dict[str, Any],
    layout: str = "plain",
    dtype: str = "float32",
    length: int = 64,
    is_checkpointed: bool = False,
    adapters: int = 0,
) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches of two rows; the second has ten culprits, and its residual is searched.

    Args:
        config: transformers' own, with its ``model_type``.
        layout: see :func:`sharded`.
        dtype: what the model computes in.
        length: of a row.
        is_checkpointed: whether activations are computed again.
        adapters: their rank; 0: all weights are trained.

    Returns:
        Of this rank, in bytes: ``held`` when the search begins, ``trained`` and ``searched`` at the peaks; ``need``,
        what the search itself reckoned with; ``events``.
    """
    precision, card = getattr(torch, dtype), Card()
    size = dist.get_world_size() if dist.is_initialized() else 1
    told: dict[str, Any] = {}

    def cheapest_plan(need: MemoryNeed, there: Any) -> int:
        told.update(need=need, held=card.live, trained=card.peak)
        card.peak = card.live
        return 0

    asked = mock.patch.multiple(
        memory,
        memory_of=lambda device: card.memory(),
        peak_of=lambda device: (card.peak, card.live),
        reset_peak=lambda device: setattr(card, "peak", card.live),
    )
    batch, norm = batch_of(config["vocab_size"], 4 * size, length), torch.tensor(1e9)
    with mock.patch.object(MemoryNeed, "cheapest_plan", cheapest_plan), asked, card:
        model = Reads(config, is_checkpointed)
        if adapters:
            inject_adapter_in_model(LoraConfig(r=adapters, target_modules=_LINEAR), model.of.model)
            for name, param in model.of.named_parameters():
                param.requires_grad_("lora" in name)
            del param
        whole = sharded(model, layout, precision)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, foreach=False)
        localizer = Localizer(
            ToyTrainer(whole, optimizer), Ranks(), GradLocConfig(evidence=EvidenceConfig(bundle="off"))
        )
        for plants in ({}, {(row % (4 * size), 3 + row): -1e4 * 0.6**row for row in range(10)}):
            step = ToyStep(model if layout == "ddp" else whole, batch.planted(plants), 2, precision)
            step.model = whole
            optimizer.zero_grad()
            limit = 4 * float(norm)
            policy = Policy(len(plants), "fixed", [4 * size * length], [limit], [limit], max_events=1)
            localizer.begin_update(policy, GradientSpace(whole))
            localizer.begin_mini_batch(step)
            step.train(localizer.after_backward)
            norm = clip_gradient(model if layout == "ddp" else whole, 1.0)
            localizer.before_step(norm)
            told["searched"] = card.peak
            localizer.end_update()
            optimizer.step()
    return told | {"events": len(localizer.events)}
