# SPDX-License-Identifier: Apache-2.0
"""Let verl's Megatron engine train on a machine without a GPU.

Megatron's local layers replace TransformerEngine's, and torch replaces the fused kernel in Triton. verl is not changed
otherwise. Made for megatron-core 0.16.1 and mbridge 0.15.1, whose private names it uses; call `install()` before the
engine is built.
"""

import contextlib
import copy
import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")

CONFIG = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "attention_backend": "unfused",
}
"""Values of `megatron.override_transformer_config` that disable kernels for GPUs."""


def install() -> None:
    """Apply every shim; a second call does nothing."""
    if getattr(torch.cpu, "_gradloc_verl_megatron", False):
        return
    torch.cpu._gradloc_verl_megatron = True  # type: ignore[attr-defined]
    install_without_verl()
    _take_local_layers()
    _take_local_experts()
    _gather_uneven_parts()
    _allow_norms_with_sequence_parallelism()
    _read_out_without_triton()
    _offload_within_one_memory()


def install_without_verl() -> None:
    """Apply the shims that Megatron needs in any loop, on any version; a second call does nothing."""
    if getattr(torch.cpu, "_gradloc_megatron", False):
        return
    torch.cpu._gradloc_megatron = True  # type: ignore[attr-defined]
    torch._dynamo.config.disable = True  # compiling takes longer than a tiny model trains
    _take_the_cpu_for_the_gpu()
    _share_the_random_state()
    _make_shards_leaves()
    _attend_without_kernels()


def engine_in(dtype: str) -> Any:
    """Return a patch of verl's engine: any dtype, where its config allows only 16 bits, and no kernels for GPUs."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    original = MegatronEngine.__init__

    def init(self: Any, model_config: Any, engine_config: Any, *args: Any, **given: Any) -> None:
        object.__setattr__(engine_config, "dtype", dtype)
        if model_config.tokenizer is None:
            object.__setattr__(model_config, "tokenizer", SimpleNamespace(pad_token_id=0))
        kept = {**engine_config.override_transformer_config, **CONFIG}
        object.__setattr__(engine_config, "override_transformer_config", kept)
        original(self, model_config, engine_config, *args, **given)
        model_parallel_cuda_manual_seed(1)  # verl's `set_random_seed` omits this on a CPU

    return mock.patch.object(MegatronEngine, "__init__", init)


def _take_the_cpu_for_the_gpu() -> None:
    torch.cuda.current_device = lambda: CPU
    _device_constructors()  # cached by torch, with its own functions
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self
    original = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **given: Any) -> Any:
        found = original(self, *args, **given)  # Megatron's optimizers sort parameters by its name
        is_plain = isinstance(found, str) and "cuda" not in found  # torch calls this function as well
        return found.replace("torch.", "torch.cuda.") if is_plain else found

    torch.Tensor.type = type_of


def _on_cpu(make: Any) -> Any:
    """Make tensor factories use the CPU for `device="cuda"`, and ignore pinning."""

    @functools.wraps(make)
    def made(*args: Any, **given: Any) -> Any:
        given.pop("pin_memory", None)
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = CPU
        return make(*args, **given)

    return made


def _share_the_random_state() -> None:
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.synchronize = lambda *_, **__: None
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _make_shards_leaves() -> None:
    """Let torch's optimizers take the distributed optimizer's shards of float32 parameters, which are no leaves."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    shards_of = DistributedOptimizer._build_model_and_main_param_groups

    def shards(cls: Any, *args: Any) -> Any:
        with torch.no_grad():
            return shards_of(*args)

    DistributedOptimizer._build_model_and_main_param_groups = classmethod(shards)


def _take_local_layers() -> None:
    """Replace TransformerEngine's layers in mbridge, which fuse a norm and so have other names."""
    from mbridge.core import llm_bridge

    spec, names = llm_bridge.get_gpt_decoder_block_spec, llm_bridge.LLMBridge._weight_name_mapping_mcore_to_hf
    norms = {".input_layernorm.": "input_layernorm", ".pre_mlp_layernorm.": "post_attention_layernorm"}

    def local(config: Any, use_transformer_engine: bool = True, **given: Any) -> Any:
        return spec(config, use_transformer_engine=False, **given)

    def hf_names(self: Any, name: str) -> list[str]:
        for megatron_name, found in norms.items():
            if megatron_name in name:
                return [f"model.layers.{name.split('.')[2]}.{found}.weight"]
        return names(self, name)

    local.__signature__ = inspect.signature(spec)  # type: ignore[attr-defined]
    llm_bridge.get_gpt_decoder_block_spec = local
    llm_bridge.LLMBridge._weight_name_mapping_mcore_to_hf = hf_names


def _gather_uneven_parts() -> None:
    """Let gloo's collectives take lists of tensors of different lengths, as NCCL's do for experts."""
    import torch.distributed as dist

    original = dist.all_gather

    def all_gather(found: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [len(part) for part in found]
        if len(set(sizes)) == 1:
            return original(found, own, group, async_op)
        padded = [part.new_zeros(max(sizes), *part.shape[1:]) for part in found]
        original(padded, torch.cat([own, own.new_zeros(max(sizes) - len(own), *own.shape[1:])]), group)
        for part, wide in zip(found, padded, strict=True):
            part.copy_(wide[: len(part)])

    def reduce_scatter(found: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None):
        total = torch.cat(parts)
        dist.all_reduce(total, op, group)
        found.copy_(total.split([len(part) for part in parts])[dist.get_rank(group)])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _take_local_experts() -> None:
    """Give mbridge TransformerEngine's names of experts' weights while it loads them; send weights from the CPU."""
    from mbridge.core import llm_bridge
    from mbridge.core.util import unwrap_model
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    load, local = llm_bridge.LLMBridge.load_weights, re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight")

    def load_weights(self: Any, models: list[Any], *args: Any, **given: Any) -> None:
        def renamed(model: Any) -> Any:
            kept = {name: value for name, value in model.state_dict().items() if not name.endswith("expert_bias")}
            weights = {local.sub(r"experts.\2.weight\1", name): value for name, value in kept.items()}
            return SimpleNamespace(decoder=model.decoder, state_dict=lambda: weights)

        load(self, [renamed(unwrap_model(model)) for model in models], *args, **given)

    def sizes_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(sizes := getattr(self, name), torch.Tensor):
                    setattr(self, name, sizes.numpy())
        return tokens_per_expert

    llm_bridge.LLMBridge.load_weights = load_weights
    moe_utils.te_general_gemm = None  # it checks the version although it is not installed
    Dispatcher.cuda_dtoh_stream = SimpleNamespace()
    Dispatcher._maybe_dtoh_and_synchronize = sizes_on_host


class _AllGather(torch.autograd.Function):
    """All-gather with a gradient: parts are stacked, and a part's gradient is summed over processes."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def _attend_without_kernels() -> None:
    """Let local attention run packed sequences and context parallelism, both of which it refuses.

    Padding comes last, so no mask is needed. Under context parallelism the keys and values of all processes are
    gathered; each process has two pieces of a sequence, symmetric about its middle.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__

    def init(self: Any, config: Any, *args: Any, **given: Any) -> None:
        plain = copy.copy(config)
        plain.context_parallel_size = 1
        original(self, plain, *args, **given)

    def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend (positions, rows, heads, size); return (positions, rows, heads * size)."""
        group = parallel_state.get_context_parallel_group()
        mask = None
        if group.size() > 1:
            key, value = (_in_order(_AllGather.apply(part, group)) for part in (key, value))
            place = torch.arange(len(key)).view(2 * group.size(), -1)
            own = place[[group.rank(), -1 - group.rank()]].flatten()
            mask = own[:, None] >= torch.arange(len(key))
        parts = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        how = {"is_causal": mask is None, "attn_mask": mask, "scale": self.softmax_scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(*parts, **how).permute(2, 0, 1, 3).flatten(2)

    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return attend(self, query, key, value)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = packed_seq_params.cu_seqlens_q if ends is None else ends
        ends = (ends // parallel_state.get_context_parallel_world_size()).tolist()
        found = []
        for start, end in zip(ends, ends[1:], strict=False):
            found.append(attend(self, *(part[start:end].unsqueeze(1) for part in (query, key, value))).squeeze(1))
        return torch.cat(found)

    DotProductAttention.__init__ = init
    DotProductAttention.forward = forward


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Reorder (processes, their positions, ...) to the sequence's order."""
    first, last = parts.chunk(2, dim=1)
    return torch.cat([*first, *last.flip(0)])


def _allow_norms_with_sequence_parallelism() -> None:
    """Let Megatron use torch's norm under sequence parallelism, marking its weight's gradient as partial."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **given: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **given)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def _read_out_without_triton() -> None:
    """Replace verl's fused kernel for log-probs and entropies; earlier layers sum the gradient over processes."""
    from verl.models.mcore import model_forward_fused
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

    def linear_cross_entropy(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = (hidden.reshape(-1, hidden.shape[-1]) @ weight.T).float() / temperature
        entropy = vocab_parallel_entropy(logits)
        # it modifies its logits in place
        log_probs = vocab_parallel_log_probs_from_logits(logits.clone(), labels.reshape(-1))
        return log_probs.view(labels.shape), entropy.view(labels.shape)

    model_forward_fused.linear_cross_entropy = linear_cross_entropy


def _offload_within_one_memory() -> None:
    """Let verl's `param_offload` and `optimizer_offload` work, and Megatron's optimizer that is kept on the host.

    All of these distinguish the GPU's memory from the host's, so "cuda" is another place while they move tensors.
    """
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer, hybrid_optimizer

    from verl.workers.engine import base
    from verl.workers.engine.megatron import transformer_impl

    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    num_tokens_of = transformer_impl.MegatronEngine._routed_num_tokens

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        tensor._is_on_host = True  # type: ignore[attr-defined]
        return tensor

    def to_float(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.to(torch.float32)
        return found if is_on_gpu.fget(tensor) else on_host(found)

    is_on_gpu = property(lambda tensor: not getattr(tensor, "_is_on_host", False))

    def deal_out(self: Any, offload_fraction: float) -> Any:
        """Ignore Megatron's `pin_memory()` on the clones that it moves to the CPU."""
        patched = {"is_cuda": is_on_gpu, "cpu": on_host, "pin_memory": lambda tensor: tensor, "float": to_float}
        with mock.patch.multiple(torch.Tensor, create=True, **patched):
            return original(self, offload_fraction)

    def on_gpu(function: Any, module: Any) -> Any:
        def run(self: Any, *args: Any, **given: Any) -> Any:
            with mock.patch.object(module, "get_device_name", lambda: "cuda"):
                return function(self, *args, **given)

        return run

    def num_tokens(self: Any, data: Any) -> torch.Tensor:
        return num_tokens_of(self, data).clone()  # verl copies this offset to a GPU and sums it over ranks in place

    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(wait=lambda stream: None, synchronize=lambda: None)
    stream.record_event = lambda: event
    at_once = {"current_stream": lambda: stream, "Stream": lambda: stream, "stream": contextlib.nullcontext}
    hybrid_optimizer.torch = SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(**at_once)})
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = deal_out
    optimizer_config.is_te_min_version = lambda *_, **__: False  # it checks the version although it is not installed
    transformer_impl.MegatronEngine.to = on_gpu(transformer_impl.MegatronEngine.to, transformer_impl)
    for kind in (transformer_impl.EngineTrainModeCtx, transformer_impl.EngineEvalModeCtx):
        kind.__enter__ = on_gpu(kind.__enter__, base)
    transformer_impl.MegatronEngine._routed_num_tokens = num_tokens
