# SPDX-License-Identifier: Apache-2.0
"""One seed of each kind of tests/watch/any_loss.py: planted tokens are named and certified, whatever the loss."""

import math

import pytest

from tests.watch.any_loss import KINDS, measure

WITHOUT_CERTIFICATE = {"distilled", "value-of-two-layers", "embedded-outside"}
"""Kinds of which the gradient of some parameters is not searched."""
HALF = {"fp16-scaler", "bfloat16-weights", "bfloat16-autocast"}
LAYERED = ("cross-entropy", "ppo-ratio-3", "smoothed", "tied", "clipped-by-group", "bfloat16-weights", "value-head")
QUICK = ("cross-entropy", "clipped", "distilled", "value-head")
SLOW = ("tied", "ppo-ratio-1", "chunked", "clipped-by-group", "bfloat16-weights")
"""Others hold what these do: on two ranks, as a model's kind, or with a part of the loss more."""
FEW_QUICK = [
    pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow if kind in SLOW else pytest.mark.full)
    for kind in KINDS
]
DEFAULT = (("ddp", "clipped-by-group"), ("fsdp2", "ppo-ratio-3"), ("fsdp1", "tied"))
ON_RANKS = [
    pytest.param("fsdp1", "clipped-by-largest", marks=pytest.mark.full),
    *(
        pytest.param(layout, kind, marks=pytest.mark.full if (layout, kind) in DEFAULT else pytest.mark.slow)
        for layout in ("ddp", "fsdp2", "fsdp1")
        for kind in LAYERED
        if (layout, kind) != ("fsdp1", "clipped-by-group")  # it has one clip for all
    ),
]


def check(kind, found):
    assert (found.named, found.innocents) == (found.planted, 0), found
    if math.isnan(found.error):
        assert kind in WITHOUT_CERTIFICATE and "was not searched" in found.said and found.taken == "skip"
        return
    assert found.verdict == "explained" and found.is_within and found.taken == "mask", found
    assert found.error < (5e-3 if kind in HALF else 1e-4) and found.apart < (5e-3 if kind in HALF else 1e-5), found


@pytest.mark.parametrize("kind", FEW_QUICK)
def test_planted_tokens_are_named_without_logits_gradients(kind):
    check(kind, measure(kind, 1, keeps=("not kept",))["not kept"])


@pytest.mark.parametrize("kind", ["distilled", "bfloat16-weights"])
def test_planted_tokens_are_named_with_logits_gradients(kind):
    found = measure(kind, 1, keeps=("kept",))["kept"]
    check(kind, found)
    assert found.apart == 0.0


@pytest.mark.parametrize(("layout", "kind"), ON_RANKS)
def test_planted_tokens_are_named_on_two_ranks(bare_world, layout, kind):
    found, _ = bare_world.run("tests.watch.any_loss.measure", kind=kind, seed=1, layout=layout, keeps=("not kept",))
    check(kind, found["not kept"])
