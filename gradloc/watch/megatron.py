# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: the gradient that its optimizer is about to take as one vector, and passes of a loop of its own.

Megatron accumulates gradients in one float32 buffer of each model chunk. ``prepare_grads`` shows the optimizer's own
parameters views of it: this process' slices with the distributed optimizer, else whole parameters. So a gradient is set
aside by copy, and what is put back is what the optimizer's step then takes. Weights are moved on the optimizer's
parameters, from where the model takes them. Experts have a buffer, an optimizer and parallel ranks of their own; so
what counts is settled by names, over all processes.

A pass runs the model, and at its end what Megatron's schedule runs behind its last backward: the reduction over ranks.
So a masked gradient is the one that training without the token would have had.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.engines import EngineSpace, WeightView
from ..core.forward_state import OwnBuffers
from ..core.ranks import Ranks
from ..private_api import replaced

_KEPT = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
"""Attributes of Megatron's optimizers: the model's parameters, and their own for them; the first two are unsharded."""
_DECOUPLED = ("model_float16_groups", "shard_float16_groups"), _KEPT[-1]
"""The same of the precision-aware optimizer: shards of the model's own, with float32 copies elsewhere."""
# values of Megatron's own settings in a loop, of its model, DDP and optimizer: no search was run with others
_NEEDED = {
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_impl": "none",
    "defer_embedding_wgrad_compute": False,
}
_NEEDED_OF_DDP = {"overlap_param_gather": False, "use_megatron_fsdp": False}
_NEEDED_OF_OPTIMIZER = {"use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
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


def without_wrappers(chunk: Any) -> Any:
    """Return a model chunk without Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def is_chunk(module: Any) -> bool:
    """Return whether this is Megatron's DistributedDataParallel around a model chunk."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "_BaseDataParallel" and kind.__module__.startswith("megatron.core.") for kind in kinds)


def clip_as_megatron(optimizer: Any) -> float:
    """Clip what is in the optimizer's ``.grad`` as its own step does; returns the norm before."""
    plain = {"prepare_grads": lambda: False, "step_with_ready_grads": lambda: True, "count_zeros": lambda: 0.0}
    kind = type(optimizer)
    with replaced(optimizer, **plain, get_grad_norm=lambda: kind.get_grad_norm(optimizer)):
        _, norm, _ = kind.step(optimizer)
    return float(norm)


class MegatronEngine:
    """A loop of Megatron's own: its passes, and the step of the optimizer that ``get_megatron_optimizer`` returns; None
    where the loop gave none."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any):
        self.chunks, self.optimizer = list(chunks), optimizer
        self._finalize: Callable[[], None] | None = None
        """Reduces the gradient as the schedule did behind its last backward; None where the schedule does not."""
        self._num_tokens: torch.Tensor | None = None
        self._space: LoopSpace | None = None

    def refusal(self) -> str:
        """Return why this loop cannot be watched, in a sentence; empty where it can."""
        from megatron.core import parallel_state as parallel

        if not parallel.model_parallel_is_initialized():
            return "gradloc does not look into Megatron without its parallel_state"
        outer, model = self.chunks[0], without_wrappers(self.chunks[0])
        blocks = (
            (model.config, _NEEDED),
            (getattr(outer, "ddp_config", None), _NEEDED_OF_DDP),
            (getattr(self.optimizer, "config", None), _NEEDED_OF_OPTIMIZER),
        )
        refused = {
            "an optimizer other than Megatron's own": not hasattr(self.optimizer, "chained_optimizers"),
            "tensor parallelism": parallel.get_tensor_model_parallel_world_size() > 1,
            "pipeline parallelism": max(parallel.get_pipeline_model_parallel_world_size(), len(self.chunks)) > 1,
            "context parallelism": parallel.get_context_parallel_world_size() > 1,
            "another wrapper than its DistributedDataParallel": not hasattr(outer, "bucket_groups"),
            "a model that is no GPTModel": not (hasattr(model, "output_layer") and hasattr(model, "decoder")),
        }
        for block, names in blocks:
            set_now = {name: getattr(block, name, needed) for name, needed in names.items()}
            refused |= {f"{name}={value}": value not in (names[name], None) for name, value in set_now.items()}
        found = next((what for what, is_there in refused.items() if is_there), "")
        return found and f"gradloc does not look into Megatron with {found}"

    @property
    def clip_limit(self) -> float:
        """The norm that the optimizer's step clips to; inf: it does not clip."""
        return float(leaves_of(self.optimizer)[0].config.clip_grad) or float("inf")

    @property
    def divisor(self) -> int | None:
        """What the sum over ranks is divided by: all ranks' tokens with ``calculate_per_token_loss``, else None."""
        return None if self._num_tokens is None else int(self._num_tokens)

    def make_space(self, ranks: Ranks) -> "LoopSpace":
        """Return the trained parameters, at each step the same; note how the schedule reduces this step's gradient."""
        self._note_reduction()
        if self._space is None:
            self._space = LoopSpace(self.chunks, self.optimizer, ranks)
        return self._space

    def on_step(self, check: Callable[[], None]) -> None:
        """Wrap the optimizer's step: call ``check`` before its clip, and take no step if ``check`` left no gradient."""
        optimizer = self.optimizer
        take_step, norm_of, take = optimizer.step, optimizer.get_grad_norm, optimizer.step_with_ready_grads

        def get_grad_norm() -> Any:
            check()
            return norm_of()

        def step_with_ready_grads() -> Any:
            is_skipped = self._space is not None and all(grad is None for grad in self._space.current())
            return True if is_skipped else take()

        def step(*args: Any, **given: Any) -> Any:
            with replaced(optimizer, get_grad_norm=get_grad_norm, step_with_ready_grads=step_with_ready_grads):
                return take_step(*args, **given)

        optimizer.step = step

    def _note_reduction(self) -> None:
        """Have the schedule's next reduction noted, which a loop may set behind our back at any time."""
        config = without_wrappers(self.chunks[0]).config
        finalize = config.finalize_model_grads_func
        if finalize is None or hasattr(finalize, "_gradloc"):
            return

        def finalize_and_note(model: Any, num_tokens: torch.Tensor | None = None, *args: Any, **given: Any) -> None:
            own = None if num_tokens is None else num_tokens.clone()  # it is summed over all ranks in place
            self._num_tokens = num_tokens
            self._finalize = lambda: finalize(model, None if own is None else own.clone(), *args, **given)
            finalize(model, num_tokens, *args, **given)

        finalize_and_note._gradloc = True  # type: ignore[attr-defined]
        config.finalize_model_grads_func = finalize_and_note

    # ---- a pass

    @contextmanager
    def in_pass(self, is_last: bool) -> Iterator[None]:
        """Surround the forward and the backward of a micro-batch; the last one's reduces the gradient of all."""
        with nullcontext() if is_last else self.chunks[0].no_sync():
            yield
        if not is_last:
            return
        if self._finalize is None:
            from megatron.core.distributed import finalize_model_grads

            finalize_model_grads(self.chunks)
        else:
            self._finalize()
        self.optimizer.prepare_grads()


class _Decoupled(WeightView):
    """A parameter of the precision-aware optimizer: in 16 bits, with a float32 gradient under another name."""

    param: torch.Tensor
    """The optimizer's own."""
    grad = property(
        lambda self: getattr(self.param, "decoupled_grad", None),
        lambda self, grad: setattr(self.param, "decoupled_grad", grad),
    )

    @staticmethod
    def over(param: torch.Tensor) -> "_Decoupled":
        view = _Decoupled(param.detach(), requires_grad=False)
        view.param = param
        return view

    def element_size(self) -> int:
        """Return the size of the gradient's elements, by which a search computes the memory of its copies."""
        return torch.float32.itemsize


class MegatronSpace(EngineSpace):
    """Parameters that Megatron's optimizer trains, of model chunks in its DistributedDataParallel.

    All processes make theirs together. With ``ranks``, all hear of it when one fails in its own part of a sum.

    Raises:
        RuntimeError: the optimizer holds parameters in a way that is not known.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, ranks: Ranks | None = None):
        self.chunks, self.optimizer, self.module = chunks, optimizer, chunks[0]
        self._leaves = leaves_of(optimizer)
        parts = dict(_parts(chunks, self._leaves))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [(name, part.place, part.is_original) for name, part in parts.items()])
        before = [part for process_parts in everyone[: dist.get_rank()] for part in process_parts]
        held = {place for _, place, is_original in before if is_original}
        first: Any = next(param for param in self.module.parameters() if param.requires_grad)
        elsewhere = _Shard(torch.nn.Parameter(torch.empty(0, device=first.device)), True, "")
        names = dict.fromkeys(name for process_parts in everyone for name, _, _ in process_parts)
        named = [(name, parts.get(name, elsewhere)) for name in names]
        dtype = first.main_grad.dtype
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
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def abandon_pass(self) -> None:
        self.empty()
        self.clear()

    def empty(self) -> None:
        """Empty the buffers that backwards add to."""
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.grad_reduce_handle is not None:  # of a pass that was cut off
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
            chunk.zero_grad_buffer()

    def buffers(self) -> set[int]:
        return {
            buffer.grad_data.untyped_storage().data_ptr()
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        }


class LoopSpace(MegatronSpace):
    """The same of a loop, whose passes add to the buffers that training's backwards add to."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, ranks: Ranks | None = None):
        super().__init__(chunks, optimizer, ranks)
        self.model = without_wrappers(self.module)
        self._buffers = [OwnBuffers(owner) for owner in self.model.modules() if owner._buffers]

    def clear(self) -> None:
        super().clear()
        self.empty()


def _parts(chunks: Sequence[Any], leaves: list[Any]) -> Iterator[tuple[str, _Shard]]:
    """Yield the optimizer's parts of this process' parameters, by name."""
    from megatron.core import parallel_state

    names = {id(param): name for name, param in _named(chunks)}
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
            yield name, _Shard(held_as, _is_original(main), f"{name} {expert} {split} {start}")


def _is_original(param: torch.Tensor) -> bool:
    """Return whether this is no copy of a tied embedding, as the last stage has one."""
    return not getattr(param, "shared", False)


def _named(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all chunks' parameters by name: layers and experts have their number in the whole model, and an embedding's
    copy has its name."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_model_parallel_world_size()
    for chunk in map(without_wrappers, chunks):
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
            yield whole if _is_original(param) else _EMBEDDING, param


def _kept_by(leaf: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield pairs of the model's parameters and the optimizer's for them."""
    where = _DECOUPLED if is_decoupled(leaf) else _KEPT
    kinds = [(getattr(leaf, models), getattr(leaf, mains)) for models, mains in where if hasattr(leaf, models)]
    if not kinds:
        yield from ((param, param) for param in leaf.get_parameters())
    for models, mains in kinds:
        for model_params, main_params in zip(models, mains, strict=True):
            yield from zip(model_params, main_params, strict=True)
