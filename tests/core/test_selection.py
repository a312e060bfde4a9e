# SPDX-License-Identifier: Apache-2.0
"""The laws of sets of tokens: halves are disjoint and complete, and what is detached changes no value."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc.core.selection import Part, Token, mask_of, mask_without
from gradloc.core.step import let_through

QUICK = settings(deadline=None, derandomize=True, max_examples=60)
MASKS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3).map(torch.tensor)


@QUICK
@given(st.integers(2, 9), st.integers(0, 3), MASKS)
def test_the_halves_of_ranks_are_disjoint_complete_and_nearly_equal(num_ranks, micro_batch, mask):
    part = Part(micro_batch, 1, 1 + num_ranks)
    left, right = part.halves(0)
    assert {left.micro_batch, right.micro_batch} == {micro_batch} and part.num_ranks == num_ranks
    assert 0 <= right.num_ranks - left.num_ranks <= 1 and left.num_ranks + right.num_ranks == num_ranks
    for rank in range(num_ranks + 3):
        found = [mask_of(each, rank, mask) for each in (left, right)]
        assert not (found[0] & found[1]).any()
        assert torch.equal(found[0] | found[1], mask if 1 <= rank <= num_ranks else torch.zeros_like(mask))


@QUICK
@given(MASKS.filter(lambda mask: int(mask.sum()) >= 2))
def test_the_halves_of_one_rank_s_tokens_go_down_to_each_token_alone(mask):
    alone, parts = [], [Part(0, 4, 5)]
    while parts:
        part = parts.pop()
        tokens = mask_of(part, 4, mask)
        if int(tokens.sum()) == 1:
            alone.append(tokens)
            continue
        halves = part.halves(int(tokens.sum()))
        sizes = [int(mask_of(half, 4, mask).sum()) for half in halves]
        assert sum(sizes) == int(tokens.sum()) and 0 <= sizes[1] - sizes[0] <= 1
        parts += halves
    assert torch.equal(torch.stack(alone).sum(0).bool(), mask) and len(alone) == int(mask.sum())


def test_one_token_is_not_halved():
    with pytest.raises(ValueError, match="1 tokens on one rank cannot be halved"):
        Part(0, 0, 1).halves(1)


@QUICK
@given(MASKS, st.sets(st.integers(0, 14)))
def test_what_is_left_out_are_those_tokens_of_that_micro_batch_and_rank(mask, numbers):
    count = int(mask.sum())
    tokens = [Token(1, 2, number) for number in sorted(numbers) if number < count]
    kept = mask_without(tokens, 1, 2, mask)
    left_out = (~kept).flatten().nonzero().squeeze(-1).tolist()
    places = mask.flatten().nonzero().squeeze(-1).tolist()
    assert left_out == [places[token.index] for token in tokens]
    assert mask_without(tokens, 0, 2, mask).all() and mask_without(tokens, 1, 0, mask).all()


@QUICK
@given(MASKS, st.integers(0, 2**30))
def test_letting_some_tokens_through_keeps_every_value_and_gradients_add_up(mask, seed):
    log_prob = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    gradients = []
    for selected in (mask, ~mask):
        seen = let_through(selected, log_prob)
        assert torch.equal(seen, log_prob)
        (gradient,) = torch.autograd.grad((seen.exp() * seen).sum(), log_prob)
        assert not gradient[~selected].any(), "detached"
        gradients.append(gradient)
    (whole,) = torch.autograd.grad((log_prob.exp() * log_prob).sum(), log_prob)
    assert torch.equal(gradients[0] + gradients[1], whole)
