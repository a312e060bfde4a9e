# SPDX-License-Identifier: Apache-2.0
"""Logits and log-probs in float32 of half-precision operands: in parts, and where a device multiplies into float32."""

from types import SimpleNamespace

import pytest
import torch

from gradloc.adapters.verl_common.precise import PartedHead, fused_log_probs, part_bytes, reads_in_parts
from gradloc.core import precise
from gradloc.core.precise import precise_linear
from tests.core.card import Card


@pytest.mark.parametrize("has_bias", [True, False])
def test_logits_in_parts_of_the_vocabulary_are_those_of_the_whole(monkeypatch, has_bias):
    monkeypatch.setattr(precise, "_VOCABULARY_PART", 7)
    hidden = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    head = torch.nn.Linear(8, 23, bias=has_bias, dtype=torch.bfloat16)
    with torch.no_grad():
        found = precise_linear(hidden, head.weight, head.bias)
        bias = head.bias.float() if has_bias else None
        wanted = torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)
    torch.testing.assert_close(found, wanted)


def test_log_probs_and_entropies_without_logits_are_those_of_them():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator) for size in (1100, 50))  # more rows than one part
    labels = torch.randint(50, (11, 100), generator=generator)
    log_prob, entropy = fused_log_probs(hidden.view(11, 100, 16), weight, labels, temperature=0.7)
    expected = (hidden @ weight.T / 0.7).log_softmax(-1).view(11, 100, 50)
    assert torch.allclose(log_prob, expected.gather(-1, labels[..., None]).squeeze(-1), atol=1e-5)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)


def test_a_product_into_float32_is_taken_where_the_device_has_it_and_gives_the_same_log_probs(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(600, 64, generator=generator).bfloat16()
    weight = (torch.randn(97, 64, generator=generator) / 8).bfloat16()
    labels = torch.randint(97, (600,), generator=generator)
    monkeypatch.setattr(precise, "_wide_products", {})
    plain = fused_log_probs(hidden, weight, labels)
    assert precise._wide_products == {("cpu", torch.bfloat16): False}, "torch has none for a CPU"
    product, calls = torch.mm, []

    def mm(left, right, *, out_dtype=None, **given):
        if out_dtype is None:
            return product(left, right, **given)
        calls.append((left.dtype, right.dtype))  # exact products, added up in float32
        return product(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(precise, "_wide_products", {})
    wide = fused_log_probs(hidden, weight, labels)
    assert calls == [(torch.bfloat16,) * 2] * 3, "asked once, and two parts"
    logits = (hidden.double() @ weight.double().T).log_softmax(-1)
    exact = logits.gather(-1, labels[:, None]).squeeze(-1), -(logits.exp() * logits).sum(-1)
    for found in (plain, wide):
        for values, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(values.double(), wanted, rtol=0, atol=2e-6)
    for values, wanted in zip(wide, plain, strict=True):
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-6)
    precise_linear(hidden.float(), weight.float(), None)
    assert len(calls) == 3, "float32 operands are multiplied as they are"


class Toy(torch.nn.Module):
    """A head alone; ``factor`` of its logits."""

    def __init__(self, factor: float | None = None, vocabulary: int = 4096):
        super().__init__()
        self.lm_head = torch.nn.Linear(16, vocabulary, dtype=torch.bfloat16)
        self.config, self.factor = SimpleNamespace(logit_scale=None), factor

    def forward(self, hidden):
        logits = self.lm_head(hidden)
        return SimpleNamespace(logits=logits if self.factor is None else logits * self.factor)


@torch.no_grad()
def test_a_head_read_in_parts_takes_no_more_memory_than_it_says():
    model, hidden = Toy(), torch.randn(1, 2000, 16).bfloat16()
    with PartedHead(model, 0.7) as parted, Card() as card:
        parted.labels = torch.arange(2000).unsqueeze(0)
        before = card.live
        found = parted.outputs_of(model(hidden))
    logits = precise_linear(hidden, model.lm_head.weight, model.lm_head.bias).div(0.7).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, logits.gather(-1, parted.labels[..., None]).squeeze(-1))
    torch.testing.assert_close(found.entropy, -(logits.exp() * logits).sum(-1))
    assert 0.7 < (card.peak - before) / part_bytes(2000, 4096) < 1.05


@torch.no_grad()
def test_a_model_that_computes_with_its_logits_is_not_read_at_its_head():
    model = Toy(factor=0.5)
    assert reads_in_parts(model, torch.bfloat16) and not reads_in_parts(model, torch.float32)
    with PartedHead(model, 1.0) as parted:
        parted.labels = torch.zeros(1, 3, dtype=torch.long)
        assert parted.outputs_of(model(torch.ones(1, 3, 16).bfloat16())).log_probs.shape == (1, 3)
    assert not reads_in_parts(model, torch.bfloat16), "it is known from now on"
    model = Toy()
    model.config.logit_scale = 0.5
    assert not reads_in_parts(model, torch.bfloat16), "its config says so"
