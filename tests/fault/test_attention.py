# SPDX-License-Identifier: Apache-2.0
"""Attention logits: the bound holds against the logits themselves, and looking changes nothing."""

import pytest
import torch
from torch import nn

from gradloc.core.ranks import Ranks
from gradloc.fault.attention import AttentionLogits, _bound
from lab.benchmarks import links
from tests.fault.test_links import events, trained

GROWN = 300.0


def grow(model: nn.Module) -> None:
    """Make the queries, keys and values of the second block larger."""
    with torch.no_grad():
        model.blocks[1].qkv.weight.mul_(GROWN)


def largest_of(seen: AttentionLogits) -> tuple[float, str]:
    """Return the largest bound and its module's name, on one process."""
    seen.sizes = [float(bound) for bound in seen.bounds]
    return seen.largest(Ranks(None))


def logits_of(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the attention logits of a block, (B, heads, T, T)."""
    rows, length, _ = x.shape
    query, key, _ = block.qkv(block.first(x)).view(rows, length, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
    return query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5


def test_the_bound_is_on_the_largest_logits_and_results_stay_bit_for_bit():
    torch.manual_seed(0)
    model, ids, largest = links.Gpt(32, 3, 4), torch.randint(256, (2, 9)), list[float]()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, given: largest.append(logits_of(block, *given).max().item()))
    grow(model)
    plain = model(ids)
    with AttentionLogits(model) as seen:
        watched = model(ids)
    bound, name = largest_of(seen)
    assert torch.equal(plain, watched) and name == "blocks.1"
    assert max(largest) <= bound <= 20 * max(largest)


def test_the_bound_is_that_of_each_head_with_the_key_it_shares():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)  # two heads share a key
    query[1, 3], key[0, 0] = 10 * query[1, 3], 10 * key[0, 0]  # of heads that do not meet
    sizes = [
        float(query[row, head].norm(dim=-1).max() * key[row, head // 2].norm(dim=-1).max()) / 8**0.5
        for row in range(2)
        for head in range(4)
    ]
    assert _bound(query, key, None).item() == pytest.approx(max(sizes))
    assert _bound(query.bfloat16(), key.bfloat16(), 0.5).item() == pytest.approx(max(sizes) * 8**0.5 / 2, rel=0.02)


def test_a_softmax_over_something_else_than_keys_is_no_attention():
    class Segmenter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, dim=1)  # over classes

    with AttentionLogits(model := Segmenter()) as seen:
        model(1e4 * torch.ones(1, 3, 4, 4))
    assert largest_of(seen) == (0.0, "")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_transformers_is_seen(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=attention))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(3000.0)
    with AttentionLogits(model) as seen:
        model(torch.randint(64, (2, 9)))
    bound, name = largest_of(seen)
    assert bound > 100 and name == "model.layers.1.self_attn"


@pytest.mark.full
def test_weights_at_fault_say_where_attention_is_out_of_bounds(tmp_path):
    run = trained(links.HEALTHY, links.Plan.of("gpt", 2), folder=str(tmp_path))
    grow(run.model)
    for _ in range(4):
        run.take()
    first, *_ = events(tmp_path)
    assert first["fault"]["at"] == "weights" and not first["culprits"]
    assert first["fault"]["evidence"]["attention_logit"] > 100
    assert "attention logits reach up to" in first["fault"]["reason"] and "blocks.1" in first["fault"]["reason"]
    run.watch.close()
