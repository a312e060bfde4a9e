# SPDX-License-Identifier: Apache-2.0
"""Forwards in float32 whatever training computes in, and training bit for bit what it was after them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradloc.core.gradients import GradientSpace
from gradloc.core.precision import NoFloat32, Shift, cast_bytes, cast_weights, float32_forwards, shifted_weights
from gradloc.core.sharding import reshard
from tests.toy_model import build, random_batch, shard

BF16 = torch.bfloat16


class Autocast(torch.nn.Module):
    """A model that switches autocast on by itself, as trainers do."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner
        self.head = inner.head

    def forward(self, *args: Any) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return self.inner(*args)


def made(layout: str) -> torch.nn.Module:
    model = build("tiny")
    if layout == "kept in bfloat16":
        return model.to(BF16)
    if layout == "autocast":
        return Autocast(model)
    if layout == "DDP, kept in bfloat16":
        return DistributedDataParallel(model.to(BF16))
    if layout == "fsdp1, original parameters":
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
        return FSDP1(model, mixed_precision=precision, use_orig_params=True, device_id=torch.device("cpu"))
    if layout == "fsdp1, gathered weights kept":
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
        strategy = ShardingStrategy.SHARD_GRAD_OP
        return FSDP1(model, mixed_precision=precision, sharding_strategy=strategy, device_id=torch.device("cpu"))
    if layout == "fsdp2, kept in bfloat16":
        model = model.to(BF16)
    return shard(model, layout.split(",")[0], BF16)


def around(layout: str) -> dict[str, Any]:
    """Forwards and gradients of training before and after forwards in float32; what a world's ranks call."""
    model, batch = made(layout), random_batch(build("tiny"), rows=4)
    reference = build("tiny")
    if layout.endswith("kept in bfloat16"):
        reference = reference.to(BF16).float()
    tokens = batch.tokens.roll(dist.get_rank() if dist.is_initialized() else 0, 0)

    def logits(of: torch.nn.Module = model) -> torch.Tensor:
        with torch.no_grad():
            return of(tokens, 4).clone()

    def gradient() -> list[torch.Tensor]:
        reshard(model)  # FSDP2's root keeps what a forward without a backward gathered
        model.zero_grad()
        model(tokens, 4).float().log_softmax(-1)[..., 0].sum().backward()
        space = GradientSpace(model)
        return [torch.zeros(0) if grad is None else grad.detach().clone() for grad in space.current()]

    first, coefficients = logits(), gradient()
    reshard(model)
    held = {name: value.detach().clone() for name, value in model.named_parameters()}
    with float32_forwards(model):
        wide = logits()
    named = {name: value.detach() for name, value in model.named_parameters()}
    again = logits(), gradient()

    def local(value: torch.Tensor) -> torch.Tensor:
        return getattr(value, "_local_tensor", value)

    return {
        "off": float((wide.float() - logits(reference)).abs().max()),
        "off in training": float((first.float() - logits(reference)).abs().max()),
        "dtype": str(wide.dtype),
        "forward": torch.equal(first, again[0]),
        "gradient": all(torch.equal(local(a), local(b)) for a, b in zip(coefficients, again[1], strict=True)),
        "weights": [*held] == [*named] and all(torch.equal(local(held[name]), local(named[name])) for name in held),
    }


def check(found: dict[str, Any]) -> None:
    assert found["off"] < 1e-5 < 1e-3 < found["off in training"] and found["dtype"] == "torch.float32"
    assert found["forward"] and found["gradient"] and found["weights"]


@pytest.mark.parametrize("layout", ["kept in bfloat16", "autocast"])
def test_a_forward_is_float32_s_and_training_is_bit_for_bit_what_it_was(layout):
    check(around(layout))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2",
        "fsdp2, kept in bfloat16",
        "fsdp1",
        "fsdp1, original parameters",
        "fsdp1, gathered weights kept",
        "DDP, kept in bfloat16",
    ],
)
def test_so_it_is_on_two_ranks(bare_world, layout):
    for found in bare_world.run("tests.core.test_precision.around", layout=layout):
        check(found)


def shifted_shards() -> dict[str, Any]:
    """FSDP2's half-precision shards, shifted: what a world's ranks call."""
    model, exact, tokens = made("fsdp2, kept in bfloat16"), build("tiny").to(BF16).float(), random_batch(build("tiny"))
    torch.manual_seed(1)
    whole = {name: torch.randn_like(param) for name, param in exact.named_parameters()}
    directions, held = {}, {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            part = distribute_tensor(whole[name], param.device_mesh, param.placements).to_local()
            directions[id(param)], held[name] = part, param.to_local().clone()
        for name, param in exact.named_parameters():
            param.add_(whole[name], alpha=1e-5)
        model(tokens.tokens, 4)  # as training, before any search
        with float32_forwards(model, Shift(directions, 1e-5)):
            moved = model(tokens.tokens, 4)
        is_kept = all(torch.equal(held[name], param.to_local()) for name, param in model.named_parameters())
        off = float((moved - exact(tokens.tokens, 4)).abs().max())
    return {"off": off, "is_kept": is_kept, "all": len(shifted_weights(model)) == len(held), "bytes": cast_bytes(model)}


@pytest.mark.full
def test_a_shift_moves_shards_that_are_kept_in_half_precision_and_no_weight(bare_world):
    for found in bare_world.run("tests.core.test_precision.shifted_shards"):
        assert found["off"] < 1e-5 and found["is_kept"] and found["all"] and found["bytes"] > 0


def test_a_shift_moves_the_casts_exactly_and_no_weight():
    model, batch = build("tiny").to(BF16), random_batch(build("tiny"), rows=4)
    before, exact = copy.deepcopy(model), copy.deepcopy(model).float()
    torch.manual_seed(1)
    along, head = {id(param): torch.randn_like(param) for param in model.parameters()}, model.head.weight
    with torch.no_grad():
        for param, of in zip(exact.parameters(), model.parameters(), strict=True):
            param.add_(along[id(of)].float(), alpha=1e-5)
        with float32_forwards(model, Shift(along, 1e-5)):
            moved = model(batch.tokens, 4)
        assert torch.equal(moved, exact(batch.tokens, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert len(cast_weights(model)) == len(list(model.parameters())) and cast_weights(exact) == []
    one, *_, whole = (sum(param.numel() for param in part.parameters()) for part in (*model.blocks, model))
    assert cast_bytes(model) == 4 * (whole - one) and cast_bytes(exact) == 0, "of two layers one at a time"
    with float32_forwards(model, Shift(along, 1.0)):
        assert torch.equal(model.head.weight, before.head.weight.float() + along[id(head)].float()), "as TRL reads it"


def test_a_forward_that_fails_leaves_everything_as_it_was():
    model = Autocast(build("tiny").to(BF16))
    params, tokens = list(model.parameters()), random_batch(build("tiny"), rows=4).tokens
    model.inner.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), float32_forwards(model), torch.no_grad():
        model(tokens, 4)
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    with torch.autocast("cpu", BF16):
        assert torch.is_autocast_enabled("cpu")
    assert not model.inner.blocks[0]._forward_pre_hooks


def test_quantized_weights_are_refused():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(NoFloat32, match="quantized"), float32_forwards(model):
        pass


@pytest.mark.full
@pytest.mark.parametrize("inputs", ["packed", "padded", "whole"])
def test_where_a_flash_kernel_takes_no_float32_attention_is_torch_s_own(monkeypatch, inputs):
    from transformers import Qwen2Config, Qwen2ForCausalLM, modeling_flash_attention_utils

    def kernel(query, key, value, *_, causal=False, softmax_scale=None, dropout_p=0.0, deterministic=False, **__):
        assert query.dtype == BF16, "FlashAttention only supports fp16 and bf16"
        ran.append(query.shape)
        return query

    ran, home = [], modeling_flash_attention_utils
    process = home._lazy_define_process_function(_packed_attention_s_arguments)
    there = {
        "_flash_fn": kernel,
        "_flash_varlen_fn": kernel,
        "_pad_fn": home._pad_input,
        "_unpad_fn": home._unpad_input,
    }
    there |= {"_process_flash_kwargs_fn": process, "_loaded_implementation": "flash_attention_2"}
    for name, value in there.items():
        monkeypatch.setattr(home, name, value, raising=False)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    config = Qwen2Config(hidden_size=32, intermediate_size=64, **sizes)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(BF16)
    exact, tokens = copy.deepcopy(model).float(), torch.randint(50, (2, 7))
    model.config._attn_implementation_internal = "flash_attention_2"
    lengths = (7, 4) if inputs != "whole" else (7, 7)
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": tokens, "attention_mask": mask if inputs == "padded" else None}
    if inputs == "packed":
        places = torch.cat([torch.arange(length) for length in lengths])
        given = {"input_ids": tokens[mask.bool()][None], "position_ids": places[None]}
    with torch.no_grad():
        model(**given, use_cache=False)
        assert len(ran) == 2, "training calls the kernel in each layer"
        with float32_forwards(model):
            found = model(**given, use_cache=False).logits
        wanted = exact(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    found = found[0] if inputs == "packed" else found[mask.bool()]
    torch.testing.assert_close(found, wanted[mask.bool()], rtol=1e-4, atol=1e-5)
    assert home._flash_fn is home._flash_varlen_fn is kernel and len(ran) == 2


def _packed_attention_s_arguments(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    """What flash_attn's own kernel takes."""
