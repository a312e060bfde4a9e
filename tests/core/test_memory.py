# SPDX-License-Identifier: Apache-2.0
"""What a search needs of memory, counted from an allocator's figures; norms and logits without large copies."""

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.memory import Memory, NotEnoughMemory, choose_way, fused_log_probs, linear_in_parts

GIB = 2**30


@pytest.fixture(scope="module")
def space():
    return GradientSpace(torch.nn.Linear(16, 4, bias=False))  # a copy is 256 bytes, the largest shard 64 elements


@pytest.mark.parametrize(
    ("memory", "way"),
    [
        (Memory(free=10_000), "full"),
        # the allocator holds enough, but a replayed micro-batch needs it again
        (Memory(free=500, reserved=10_000, allocated=1_000, peak=9_000), "bisect"),
        (Memory(free=500, reserved=10_000, allocated=1_000, peak=1_000), "full"),
        (Memory(free=100, reserved=10_000, allocated=1_000, peak=10_000), None),
    ],
)
def test_what_the_allocator_holds_for_training_is_no_room_for_copies(space, memory, way):
    if way is None:
        with pytest.raises(NotEnoughMemory, match="make micro-batches smaller"):
            choose_way(space, 0, memory)
    else:
        assert choose_way(space, 0, memory) == way


def test_logits_larger_than_what_training_needs_leave_bisection(space):
    memory = Memory(free=10_000)
    assert choose_way(space, 8_000, memory) == "bisect"
    assert choose_way(space, 7_000, memory) == "full"


def test_norms_in_parts_are_those_of_the_whole(monkeypatch):
    from gradloc.core import gradients

    monkeypatch.setattr(gradients, "_PART", 100)
    monkeypatch.setattr(gradients, "_ROW", 32)  # of 561 weights the last are no whole row
    module = torch.nn.Linear(33, 17)
    module(torch.randn(5, 33)).square().sum().backward()
    squares = [param.grad.double().square().sum() for param in module.parameters()]
    torch.testing.assert_close(GradientSpace(module).squares(), torch.stack(squares))
    for size in (1e30, 1e-30):  # the square is no float32
        module.weight.grad.fill_(size)
        assert float(GradientSpace(module).squares()[0]) == pytest.approx(33 * 17 * size**2, rel=1e-5, abs=0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_logits_in_parts_of_the_vocabulary_are_those_of_the_whole(monkeypatch, has_bias):
    from gradloc.core import memory

    monkeypatch.setattr(memory, "_VOCABULARY_PART", 7)
    hidden = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    head = torch.nn.Linear(8, 23, bias=has_bias, dtype=torch.bfloat16)
    with torch.no_grad():
        found = linear_in_parts(hidden, head.weight, head.bias)
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
