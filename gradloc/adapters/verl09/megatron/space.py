# SPDX-License-Identifier: Apache-2.0
"""The gradient of Megatron's optimizer as one vector, over all its parallel ranks and its own shards.

Megatron accumulates gradients in one float32 buffer of each model chunk. ``prepare_grads`` shows the optimizer's own
parameters views of it: this process' slices with the distributed optimizer, else whole parameters. So a gradient is set
aside by copy, and what is put back is what the optimizer's step then takes. Weights are moved on the optimizer's
parameters, from where the model takes them. Experts have a buffer, an optimizer and parallel ranks of their own; so
what counts is settled by names, over all processes.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared

from ....core.engines import EngineSpace, WeightView
from ....core.ranks import Ranks

_KEPT = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
"""Attributes of Megatron's optimizers: the model's parameters, and their own for them; the first two are unsharded."""
_DECOUPLED = ("model_float16_groups", "shard_float16_groups"), _KEPT[-1]
"""Attributes of the precision-aware optimizer: shards of the model's own, with float32 copies elsewhere."""
_LAYER = re.compile(r"(.*\blayers\.)\d+$")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")
_EMBEDDING = "embedding.word_embeddings.weight"


class _Shard(NamedTuple):
    """This process' part of a parameter."""

    param: torch.nn.Parameter
    is_original: bool
    """False for the last stage's copy of a tied embedding, which must not count twice in a norm."""
    place: str
    """Seed of its random numbers: the same for copies, another for other parts."""


def leaves_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron has chained, or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_decoupled(leaf: Any) -> bool:
    """Return whether this optimizer takes gradients from ``decoupled_grad``."""
    return bool(leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def chunks_of(module: Any) -> list[Any]:
    """Return each model chunk without its wrappers."""
    chunks = []
    for chunk in module:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


class _Decoupled(WeightView):
    """A parameter of the precision-aware optimizer: in 16 bits, with a float32 gradient under another name.

    ``of`` is the optimizer's own.
    """

    of: torch.Tensor
    grad = property(
        lambda self: getattr(self.of, "decoupled_grad", None),
        lambda self, grad: setattr(self.of, "decoupled_grad", grad),
    )

    @staticmethod
    def over(param: torch.Tensor) -> "_Decoupled":
        view = _Decoupled(param.detach(), requires_grad=False)
        view.of = param
        return view

    def element_size(self) -> int:
        """Return the size of the gradient's elements, by which a search computes the memory of its copies."""
        return torch.float32.itemsize


class MegatronSpace(EngineSpace):
    """Parameters of verl's Megatron engine; all processes make theirs together.

    Args:
        engine: verl's ``MegatronEngine``, initialized.
        ranks: all of them hear of it when one fails in its own part of a sum.

    Raises:
        RuntimeError: the optimizer holds parameters in a way that is not known.
    """

    def __init__(self, engine: Any, ranks: Ranks | None = None):
        self.engine = engine
        self.module = engine.module[0]
        self._leaves = leaves_of(engine.optimizer)
        parts = dict(_parts(engine.module, self._leaves))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [(name, part.place, part.is_original) for name, part in parts.items()])
        before = [part for process_parts in everyone[: dist.get_rank()] for part in process_parts]
        held = {place for _, place, is_original in before if is_original}
        device = next(engine.module[0].parameters()).device
        elsewhere = _Shard(torch.nn.Parameter(torch.empty(0, device=device)), True, "")
        names = dict.fromkeys(name for process_parts in everyone for name, _, _ in process_parts)
        named = [(name, parts.get(name, elsewhere)) for name in names]
        dtype = next(engine.module[0].parameters()).main_grad.dtype
        params = [(name, part.param) for name, part in named]
        self._hold(params, [] if len(everyone) == 1 else [dist.group.WORLD], (dtype, dtype), ranks)
        self.rounding = torch.finfo(dtype).eps / 2
        self.has_names = False  # Megatron's are others than transformers'
        self.counts = [part.is_original and part.place not in held for _, part in named]

    @torch.no_grad()
    def publish(self) -> None:
        for leaf in self._leaves:
            if hasattr(leaf, "_copy_main_params_to_model_params"):
                leaf._copy_main_params_to_model_params()
        for chunk in self.engine.module:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def abandon_pass(self) -> None:
        self.engine.optimizer_zero_grad()
        self.clear()

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, param.detach()) for name, param in zip(self.names, self.params, strict=True)]

    def buffers(self) -> set[int]:
        return {
            buffer.grad_data.untyped_storage().data_ptr()
            for chunk in self.engine.module
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        }


def _parts(module: Any, leaves: list[Any]) -> Iterator[tuple[str, _Shard]]:
    """Yield the optimizer's parts of this process' parameters, by name."""
    names = {id(param): name for name, param in _named(module)}
    kept = {id(param): (leaf, param, main) for leaf in leaves for param, main in _kept_by(leaf)}
    held = {id(param) for leaf in leaves for param in leaf.get_parameters()}
    if {id(main) for _, _, main in kept.values()} != held:
        raise RuntimeError("Megatron's optimizer holds parameters that gradloc does not find in the model")
    for model_id, name in names.items():
        if model_id in kept:
            leaf, param, main = kept[model_id]
            is_expert = not getattr(param, "allreduce", True)
            expert = parallel_state.get_expert_model_parallel_rank() if is_expert else None
            split = None
            if getattr(param, "tensor_model_parallel", False):
                split = parallel_state.get_tensor_model_parallel_rank()
                if is_expert:
                    split = parallel_state.get_expert_tensor_parallel_rank()
            start = leaf._get_model_param_range_map(param)["param"].start if main.shape != param.shape else 0
            held_as = _Decoupled.over(main) if is_decoupled(leaf) else main
            yield name, _Shard(held_as, param_is_not_shared(main), f"{name} {expert} {split} {start}")


def _named(module: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all chunks' parameters by name: layers and experts have their number in the whole model, and an embedding's
    copy has its name."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    for chunk in chunks_of(module):
        first = parallel_state.get_expert_model_parallel_rank() * (chunk.config.num_moe_experts or 0) // ranks
        layers = {
            f"{name}.": f"{match.group(1)}{layer.layer_number - 1}."
            for name, layer in chunk.named_modules()
            if hasattr(layer, "layer_number") and (match := _LAYER.match(name))
        }
        for name, param in chunk.named_parameters():
            before = next((prefix for prefix in layers if name.startswith(prefix)), "")
            whole = layers.get(before, "") + name.removeprefix(before)
            whole = _EXPERT.sub(lambda number: str(int(number.group()) + first), whole)  # noqa: B023
            yield whole if param_is_not_shared(param) else _EMBEDDING, param


def _kept_by(leaf: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield pairs of the model's parameters and the optimizer's for them."""
    where = _DECOUPLED if is_decoupled(leaf) else _KEPT
    kinds = [(getattr(leaf, models), getattr(leaf, mains)) for models, mains in where if hasattr(leaf, models)]
    if not kinds:
        yield from ((param, param) for param in leaf.get_parameters())
    for models, mains in kinds:
        for model_params, main_params in zip(models, mains, strict=True):
            yield from zip(model_params, main_params, strict=True)
