# SPDX-License-Identifier: Apache-2.0
"""Forecast from a model's sizes whether a search will fit into the memory of a run's devices.

Imports no torch: ``gradloc check`` asks before a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .core.memory_plans import COPIES, FLOAT32, LOGIT_BYTES, PLANS, SAMPLE, USABLE, MemoryNeed, SearchPlan, rounded

PCIE = 25e9
"""Bytes a second between a device and pinned memory, of a card on 16 lanes of PCIe 4."""
PINNING = 1.65e9
"""Bytes of host memory that are pinned a second: 0.65 s a GiB on an H100's host, many times what the copy takes."""


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder that count."""

    name: str
    layers: int
    width: int
    inner: int
    """The width of the MLP's inner layer, or of one expert's."""
    queries: int
    """Heads times their width."""
    keys: int
    """Key heads times their width; values are as wide."""
    vocabulary: int
    is_tied: bool = False
    experts: int = 0
    active: int = 0
    """Experts that a token goes through; 0 of a dense model."""

    @property
    def tensors(self) -> list[int]:
        """Elements of each weight of a layer, experts as one."""
        count = max(self.experts, 1)
        mlp = [count * self.width * self.inner] * 3 + [self.experts * self.width] * bool(self.experts)
        attention = [self.width * wide for wide in (self.queries, self.keys, self.keys, self.queries)]
        return [*attention, *mlp, self.width, self.width]

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """All elements."""
        return self.layers * sum(self.tensors) + self.table * (1 if self.is_tied else 2) + self.width

    def adapted(self, rank: int) -> float:
        """Return the share of the weights that adapters of this rank on all of a layer's linear maps are."""
        mlp = 3 * max(self.experts, 1) * (self.width + self.inner)
        return self.layers * rank * (4 * self.width + 2 * (self.queries + self.keys) + mlp) / self.weights

    def layer_bytes(self, wide: int) -> int:
        """Return the bytes that a layer keeps of a position for its backward: two norms with float32 input, attention
        and MLP.

        Args:
            wide: bytes of a number that the model computes with.
        """
        mlp = 4 * self.inner * max(self.active, 1) + 2 * self.width * self.active  # to the experts and back
        return 2 * (FLOAT32 + 2 * wide) * self.width + wide * (3 * self.queries + 2 * self.keys + mlp)


def model_of(name: str, config: Mapping[str, Any]) -> Model:
    """Read a model's sizes from its ``config.json``, as transformers writes it.

    Raises:
        ValueError: one sentence, where a size is missing.
    """
    config = config.get("text_config") or config
    try:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
        return Model(
            name,
            layers=config["num_hidden_layers"],
            width=width,
            inner=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
            queries=heads * head,
            keys=(config.get("num_key_value_heads") or heads) * head,
            vocabulary=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active=config.get("num_experts_per_tok") or 0 if experts else 0,
        )
    except KeyError as error:
        raise ValueError(
            f"{name}: config.json must name {error.args[0]}, and does not: name a size by --model."
        ) from None


@dataclass(frozen=True)
class Layout:
    """A model's distribution over devices."""

    gpus: int = 1
    shards: int = 1
    """Processes that one copy of weights, gradient and optimizer state is dealt out to: FSDP's, the distributed
    optimizer's; 1 under DDP."""
    gpus_per_node: int = 8
    tensor: int = 1
    pipeline: int = 1
    whole_bytes: int = 0
    """Bytes for each weight that a process holds whole: DDP's buckets, Megatron's weights and its gradient."""
    gathers_by_layer: bool = True
    """Whether layers are gathered one by one (FSDP)."""
    trained: float = 1.0
    """Share of the weights that is trained; under 1 with adapters."""
    is_offloaded: bool = False
    """FSDP2's ``offload_policy``."""


@dataclass(frozen=True)
class Load:
    """The work of a micro-batch on a device."""

    tokens: int
    """Positions of the largest micro-batch, prompts included, on one device."""
    micro_batches: int = 1
    """A rank's micro-batches in one optimizer step."""
    number_bytes: int = 2
    """Bytes of a number that the model computes with."""
    is_checkpointed: bool = True
    logit_bytes: float = LOGIT_BYTES
    """Bytes of a logit in a forward alone, see :func:`logit_bytes`; 0 where a fused kernel never holds logits."""
    num_logit_tensors: int = 3
    """Tensors of all logits that training holds at its peak: the logits, their softmax, its gradient."""


@dataclass(frozen=True)
class Plan:
    """The facts in a run's config about its trained model."""

    model: str
    """A folder, or a name on the Hub."""
    layout: Layout
    load: Load
    adapters: int = 0
    """Rank of the adapters; 0: all weights are trained."""
    optimizer_steps: int = 1
    """The optimizer steps of an update."""


@dataclass(frozen=True)
class Forecast:
    """The memory that a search takes of one device and of its node, in bytes."""

    held: int
    """Device memory for weights, gradient, optimizer state, and samples of weights."""
    need: MemoryNeed
    processes_per_node: int

    @property
    def trained(self) -> int:
        """Device memory at the peak of a training micro-batch."""
        return self.held + self.need.micro_batch

    def device(self, plan: SearchPlan) -> int:
        """Return the device memory at the peak of a search by this plan."""
        return self.held + self.need.peak_bytes(plan)

    def node(self, plan: SearchPlan) -> int:
        """Return the memory of a node's host that a search takes by this plan."""
        return self.processes_per_node * self.need.host_bytes(plan)

    def seconds(self, plan: SearchPlan) -> float:
        """Return the seconds to pin host memory, and to move tensors to it and back once."""
        moved = self.need.state * plan.moves_optimizer + COPIES * self.need.shards * plan.keeps_on_host
        return 2 * moved / PCIE + (self.need.host_bytes(plan) - self.need.host) / PINNING

    def plan_for(self, card: float) -> SearchPlan | None:
        """Return the first plan that fits on a card of this many bytes; None if none does."""
        return next((plan for plan in PLANS if self.held + self.need.peak_bytes(plan) <= USABLE * card), None)


def forecast(model: Model, layout: Layout, load: Load) -> Forecast:
    """Forecast the memory that training and a search take of a device and its host, from sizes alone."""
    split = layout.tensor * layout.pipeline
    tables = [model.table] * (1 if model.is_tied else 2)
    tensors = [size // (split * layout.shards) for size in [*model.tensors * model.layers, *tables]]
    owned = [int(FLOAT32 * layout.trained * size) for size in tensors]
    shards, pinned, is_there = sum(owned), sum(map(rounded, owned)), not layout.is_offloaded
    need = MemoryNeed(
        shards=is_there * shards,
        largest=is_there * max(tensors),
        state=is_there * 2 * shards,
        micro_batch=_micro_batch(model, layout, load),
        forward=int(load.logit_bytes * load.tokens * model.vocabulary / layout.tensor),
        host=0 if is_there else COPIES * shards,
        pinned_state=is_there * 2 * pinned,
        pinned_copies=is_there * COPIES * pinned,
    )
    sample = FLOAT32 * SAMPLE * max(model.experts, 1)  # experts count as one tensor here
    samples = 2 * sum(min(size, sample) for size in owned)
    held = is_there * (FLOAT32 * sum(tensors) + 3 * shards + samples) + layout.whole_bytes * model.weights // split
    return Forecast(held, need, min(layout.gpus_per_node, layout.gpus))


def _micro_batch(model: Model, layout: Layout, load: Load) -> int:
    """Return the bytes of forward and backward at their peak: in the head, or in the backward of the last layer."""
    wide, each = load.number_bytes, load.tokens * load.number_bytes // layout.tensor
    table, layer, largest = (size // layout.tensor for size in (model.table, sum(model.tensors), max(model.tensors)))
    layer_bytes = load.tokens * model.layer_bytes(wide) // layout.tensor
    # the first stage of a pipeline holds a micro-batch for each stage
    kept = model.layers * (each * model.width if load.is_checkpointed else layer_bytes)
    again = layer_bytes if load.is_checkpointed else 0
    is_whole = layout.trained == 1  # a frozen weight has no gradient
    head = load.num_logit_tensors * each * model.vocabulary + is_whole * wide * table
    backward = again + is_whole * wide * largest + 2 * each * model.inner * max(model.active, 1)
    if layout.gathers_by_layer and layout.shards > 1:
        # gathered: the head, a layer and the next; the head's gradient waits; a layer's is copied to be reduced
        head += wide * (table + layer)
        backward += wide * (table + 2 * layer) + is_whole * (wide * (table + layer - largest) + FLOAT32 * layer)
    return kept + max(head, backward)


MODELS = {
    each.name: each
    for each in (
        Model("0.5B", 24, 896, 4864, 896, 128, 151_936, is_tied=True),
        Model("1.5B", 28, 1536, 8960, 1536, 256, 151_936, is_tied=True),
        Model("7B", 28, 3584, 18_944, 3584, 512, 152_064),
        Model("32B", 64, 5120, 27_648, 5120, 1024, 152_064),
        Model("72B", 80, 8192, 29_568, 8192, 1024, 152_064),
        Model("235B", 94, 4096, 1536, 8192, 512, 151_936, experts=128, active=8),
    )
}
"""Qwen2.5's, and Qwen3's mixture of experts."""
