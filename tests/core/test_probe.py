# SPDX-License-Identifier: Apache-2.0
"""Sets of tokens are cut without loss, and a probe's gradient is their exact part of training's, at its known cost."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import LostRank, Ranks
from gradloc.core.selection import Part, Token, mask_of, mask_without
from tests.toy_model import Loss, ToyStep, build, random_batch

MASKS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3).map(torch.tensor)


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


@given(MASKS, st.sets(st.integers(0, 14)))
def test_what_is_left_out_are_those_tokens_of_that_micro_batch_and_rank(mask, numbers):
    count = int(mask.sum())
    tokens = [Token(1, 2, number) for number in sorted(numbers) if number < count]
    kept = mask_without(tokens, 1, 2, mask)
    left_out = (~kept).flatten().nonzero().squeeze(-1).tolist()
    places = mask.flatten().nonzero().squeeze(-1).tolist()
    assert left_out == [places[token.index] for token in tokens]
    assert mask_without(tokens, 0, 2, mask).all() and mask_without(tokens, 1, 0, mask).all()


def probed(loss_scale=1.0, loss=Loss(entropy=0.1, kl=0.1)):  # noqa: B008 (frozen)
    """A prober of a trained step of four micro-batches, the step, and the gradient that training left."""
    model = build("tiny")
    step, space = ToyStep(model, random_batch(model), 4, loss=loss, loss_scale=loss_scale), GradientSpace(model)
    step.train()
    return Prober(step, space, Ranks()), step, space.take()


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_a_pass_notes_what_each_micro_batch_adds_to_the_square_of_the_norm(loss_scale):
    prober, _, _ = probed(loss_scale)
    squares = [0.0]
    for last in range(4):
        prober.compute_without([], range(last + 1))
        squares.append(prober.norm() ** 2)
    wanted = [abs(after - before) ** 0.5 for before, after in zip(squares[:-1], squares[1:], strict=True)]
    assert [prober.sizes[index] for index in range(4)] == pytest.approx(wanted, rel=1e-3)


def test_a_pass_whose_gradient_appears_at_its_end_notes_nothing(monkeypatch):
    prober, _, _ = probed()
    space = prober.space
    monkeypatch.setattr(space, "local_squares", lambda: torch.zeros(len(space.params)))
    prober.compute_without([])
    assert prober.norm() > 0 and prober.sizes == {}


def test_parts_of_a_pass_add_up_to_the_training_gradient_without_its_loss_scale():
    prober, _, trained = probed(loss_scale=8.0)
    space, tokens = prober.space, [Token(1, 0, 2), Token(1, 0, 3), Token(3, 0, 0)]
    prober.compute_without([])
    assert all(torch.equal(8 * part, whole) for part, whole in zip(space.take(), trained, strict=True)), "bit for bit"
    prober.compute_without(tokens)
    rest = space.take()
    prober.compute_only(tokens, [1, 3], factor=-2.0)
    prober.add(rest, alpha=-2.0)
    for part, whole in zip(space.take(), trained, strict=True):
        torch.testing.assert_close(-4 * part, whole, rtol=1e-4, atol=1e-5)
    assert (prober.num_forwards, prober.num_backwards, prober.cost) == (10, 10, 30)


@pytest.mark.parametrize("is_same", [True, False])
def test_rows_without_a_token_are_left_out_where_the_others_come_out_as_in_training(is_same):
    prober, step, _ = probed()
    each, ran = int(step.token_mask(1)[0].sum()), []
    tokens = [Token(1, 0, each), Token(3, 0, 0)]
    forward_rows, recorded = step.forward_rows, prober.step.recorded(3)

    def forward(chosen):
        ran.extend(chosen)
        ((micro_batch, rows),) = chosen
        outputs = forward_rows(chosen)  # kernels that go by the shape may let the last bits differ
        known = prober.step.recorded(micro_batch).log_prob[rows]
        recorded.log_prob[0, 0] += 0.0 if is_same else 1.0
        return outputs._replace(log_prob=outputs.log_prob + (known - outputs.log_prob).detach())

    step.forward_rows = forward
    prober.compute_only(tokens, [1, 3], factor=2.0)
    alone, num_alone = prober.space.take(), len(ran)
    assert ran == [(1, [1]), (3, [0])]
    assert prober.cost == (6 if is_same else 6 + 3 + 1), "what ran before it came out is paid"
    prober._is_by_row = False
    prober.compute_only(tokens, [1, 3], factor=2.0)
    assert len(ran) == num_alone
    for part, whole in zip(alone, prober.space.take(), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6 if is_same else 0.0)


def test_rows_of_several_micro_batches_run_together_and_their_parts_add_up():
    prober, step, trained = probed()
    generator, ran, forward_rows = torch.Generator().manual_seed(3), [], step.forward_rows
    step.forward_rows = lambda rows: ran.append(rows) or forward_rows(rows)
    masks = [step.token_mask(index) for index in range(step.num_micro_batches)]
    halves = [mask & (torch.rand(len(mask), 1, generator=generator) < 0.5) for mask in masks]
    records, total = [step.recorded(index) for index in range(len(masks))], None
    for selected in (halves, [mask & ~half for mask, half in zip(masks, halves, strict=True)]):
        prober.compute_part(records, selected)
        part = prober.space.take()
        total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
    for found, whole in zip(total, trained, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
    assert prober.num_forwards < 2 * len(masks) and any(len(rows) > 1 for rows in ran)
    most = max(len(mask) for mask in masks), max(int(mask.sum()) for mask in masks)
    for rows in ran:
        sizes = [int(masks[index][row].sum()) for index, (row,) in rows]
        assert len(sizes) <= most[0] and sum(sizes) <= most[1]


def test_all_rows_run_where_a_part_of_the_loss_passes_through_no_token():
    prober, step, _ = probed()
    step.forward_rows = None
    prober.measure(Part(1, 0, 1, 0, 1))
    step.recorded(1).auxiliary_coefficient = torch.tensor(1.0)
    prober.compute_only([Token(1, 0, 0)], [1])
    assert prober.cost == 6 and prober.space.norm() > 0


def test_a_probe_tells_the_norm_and_the_loss_weight_of_its_tokens():
    prober, step, _ = probed()
    found = prober.measure(Part(1, 0, 1, 2, 5))
    weights = step.details(1).weights[step.token_mask(1)][2:5]
    assert found.num_tokens == 3 and found.weight_norm == pytest.approx(float(weights.norm()))
    prober.compute_only([Token(1, 0, index) for index in (2, 3, 4)], [1])
    assert found.norm == pytest.approx(prober.space.norm())


def test_ranks_reduce_where_training_does_behind_the_last_micro_batch():
    prober, step, _ = probed()
    last = []
    step.in_pass = lambda is_last: last.append(is_last) or nullcontext()
    prober.compute_without([], [0, 2, 3])
    assert last == [False, False, True]


@pytest.mark.parametrize(("loss", "num_forwards"), [(Loss(entropy=0.1), 0), (Loss(), 1)])
def test_entropies_that_training_computed_take_no_forward(loss, num_forwards):
    prober, step, _ = probed(loss=loss)
    with torch.no_grad():
        torch.testing.assert_close(prober.entropies(2), step.forward(2, needs_entropy=True).entropy)
    assert prober.num_forwards == num_forwards


@pytest.mark.parametrize(("is_stuck", "error"), [(False, ArithmeticError), (True, LostRank)])
def test_a_pass_that_fails_leaves_a_module_that_can_be_trained_or_ends_the_run(is_stuck, error):
    prober, step, _ = probed()
    abandoned = []

    def fail(*_):
        raise ArithmeticError

    step.forward = fail
    prober.space.abandon_pass = fail if is_stuck else lambda: abandoned.append(True)
    with pytest.raises(error):
        prober.compute_without([])
    assert abandoned == [] if is_stuck else [True]


def test_so_does_one_whose_rows_cannot_be_compared(monkeypatch):
    prober, _, _ = probed()
    abandoned = []
    prober.space.abandon_pass = lambda: abandoned.append(True)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(torch, "equal", fail)
    with pytest.raises(MemoryError):
        prober.compute_only([Token(1, 0, 0)], [1])
    assert abandoned == [True]


def test_before_each_forward_alone_all_ranks_make_sure_that_it_has_room():
    prober, _, _ = probed(loss=Loss())
    asked = []
    prober.space.room = SimpleNamespace(make_sure=lambda: asked.append(True))
    assert prober.forward(0).entropy is None, "which nobody asked for"
    prober.entropies(2)
    assert len(asked) == 2


def test_a_pass_that_the_trainer_schedules_costs_what_any_does():
    prober, step, _ = probed()
    ran = []
    step.run_pass = lambda pulls: ran.append([index for index, _ in pulls])
    prober.step.is_scheduled = True
    prober.compute_without([], [0, 2])
    assert ran == [[0, 2]] and (prober.num_forwards, prober.num_backwards) == (2, 2)
