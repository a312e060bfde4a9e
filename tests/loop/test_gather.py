# SPDX-License-Identifier: Apache-2.0
"""What the ranks gather of a spike is what the step has: its numbers at the culprit, its terms, what was taken."""

import math
from dataclasses import replace

import pytest
import torch

from gradloc.core.trigger import Place
from gradloc.loop.gather import _most_wanted, _Row, ratio, raw_event
from gradloc.record import Action
from tests.bare import BareStep, Loss, build, random_batch, shard
from tests.bare.events import context_of

PLACE, M, THRESHOLD = (5, 2), 4, 20.0
LOSS = Loss(entropy=0.02, kl=0.05)


@pytest.fixture(scope="module")
def context():
    model = shard(build("tiny"), "plain")
    batch = random_batch(model).planted({PLACE: 1e4})
    return replace(
        context_of(BareStep(model, batch, M, loss=LOSS), batch, THRESHOLD),
        place=Place(7, 1, 2, 3, {"num_norms": 9, "median_norm": 1.5, "log_sigma": 0.2}, "low"),
        clip_limit=2.0,
        checkpoint="/ckpt",
        head_square=torch.tensor(9.0),
    )


def gathered(context, keeps_all=False, **changes):
    return raw_event(replace(context, **changes), budget=128, keeps_all=keeps_all)


def test_the_culprit_has_the_step_s_own_numbers(context):
    (found,) = gathered(context).event.culprits
    step, index, row = context.step, 1, 1
    at = (row, PLACE[1])
    recorded = step.recorded(index)
    log_prob, entropy = step.coefficients(index)
    assert (found.row, found.micro_batch, found.micro_batch_row, found.positions, found.peak) == (5, 1, 1, (2,), 2)
    assert found.log_prob == pytest.approx(float(recorded.log_prob[at]))
    assert found.old_log_prob_used == pytest.approx(float(step.details(index).old_log_prob[at]))
    assert found.entropy == pytest.approx(float(recorded.entropy[at]))
    assert found.coefficients.log_prob == pytest.approx(float(log_prob[at]))
    assert found.coefficients.kl == pytest.approx(float(step.kl_coefficients(index)[at]))
    assert found.coefficients.entropy == pytest.approx(float(entropy[at]))
    assert found.loss_weight == pytest.approx(float(step.token_weights(index)[at]))
    mask = step.token_mask(index)[row]
    ratios = (recorded.log_prob - step.details(index).old_log_prob)[row][mask]
    assert found.ratios.sequence_geometric_mean == pytest.approx(math.exp(float(ratios.mean())), rel=1e-5)
    assert found.is_exact and found.share_error == 0.0 and found.token_norms == (found.grad_norm,)
    assert math.hypot(*found.layers.values()) == pytest.approx(found.grad_norm, rel=1e-4)


def test_where_it_was_and_how_it_was_dealt_out(context):
    event = gathered(context).event
    step = event.step
    assert (step.global_step, step.epoch, step.mini_batch, step.num_mini_batches, step.stage) == (7, 1, 2, 3, "low")
    assert (step.num_micro_batches, step.world_size, step.dp_size, step.sp_size) == (M, 1, 1, 1)
    assert event.trigger.history.median_norm == 1.5 and event.trigger.grad_norm == context.spike.grad_norm
    assert event.head_grad_norm == 3.0 and event.model is None and event.search.budget == 128
    assert math.hypot(*event.layers.values()) == pytest.approx(context.spike.grad_norm, rel=1e-5)
    assert math.hypot(*event.kinds.values()) == pytest.approx(context.spike.grad_norm, rel=1e-5)
    raw = gathered(context)
    assert raw.checkpoint == "/ckpt" and raw.temperature == context.step.numerics.temperature
    assert gathered(context, place=Place(7, 0, 0, 1, None)).event.trigger.history is None


def test_terms_are_roots_of_all_tokens_squares_and_the_residual_leaves_the_culprits_out(context):
    raw, step = gathered(context), context.step
    squares = dict.fromkeys(("policy", "kl", "entropy", "all"), 0.0)
    for index in range(M):
        mask = step.token_mask(index)
        log_prob, entropy = step.coefficients(index)
        kl = step.kl_coefficients(index)
        for name, values in (("policy", log_prob - kl), ("kl", kl), ("entropy", entropy), ("all", log_prob)):
            squares[name] += float(values[mask].double().square().sum())
    for name in ("policy", "kl", "entropy"):
        assert raw.term_norms[name] == pytest.approx(squares[name] ** 0.5, rel=1e-5), name
    culprit = gathered(context).event.culprits[0].coefficients.log_prob
    assert raw.residual_coefficient_norm == pytest.approx((squares["all"] - culprit**2) ** 0.5, rel=1e-3)


def test_shares_are_summed_by_micro_batch_and_the_culprit_s_row_is_kept_token_by_token(context):
    raw, shares = gathered(context), context.finding.result.shares
    sums = [float(shares.shares(index).sum()) for index in range(M)]
    assert [of_rank for (of_rank,) in raw.event.shares.micro_batches] == pytest.approx(sums)
    (kept,) = [sequence for sequence in raw.sequences if sequence.row == 5]
    assert kept.log_prob == pytest.approx(context.step.recorded(1).log_prob[1].tolist())
    assert kept.coefficient == pytest.approx(context.step.coefficients(1)[0][1].tolist())
    assert kept.share == pytest.approx(shares.shares(1)[1].tolist())
    assert kept.share_error == pytest.approx((shares.errors[1] / shares.square)[1].tolist())
    assert [(entry.micro_batch, entry.rows) for entry in raw.layout] == [(1, [4, 5, 6, 7])]
    assert [entry.micro_batch for entry in gathered(context, keeps_all=True).layout] == [0, 1, 2, 3]


def test_each_token_of_a_span_has_the_least_norm_that_its_share_says(context):
    result, shares = context.finding.result, context.finding.result.shares
    (culprit,) = result.culprits
    last = culprit.tokens[0]
    span = replace(culprit, span="segment", tokens=(replace(last, index=last.index - 1), last), share=None)

    def found(shares):
        finding = replace(context.finding, result=replace(result, culprits=[span], shares=shares))
        event = gathered(context, finding=finding).event
        assert event.consequence.culprit_share == event.culprits[0].share
        return event.culprits[0]

    products, errors = shares.products[1][1, [1, 2]], shares.errors[1][1, [1, 2]]
    assert found(shares).positions == (1, 2) and found(shares).peak == 2
    assert found(shares).token_norms == pytest.approx((products.abs() / shares.square**0.5).tolist())
    assert found(shares).share == pytest.approx(float(products.sum()) / shares.square)
    assert found(shares).share_error == pytest.approx(float(errors.norm()) / shares.square)
    for none in (None, replace(shares, is_trusted=False)):
        assert found(none).token_norms is None and found(none).share is found(none).share_error is None


def test_rows_with_a_culprit_and_then_the_largest_are_kept_each_once():
    here, there, far = _Row(0, 1, 2), _Row(1, 0, 0), _Row(1, 3, 1)
    assert _most_wanted([[(0.2, here), (0.1, far)], [(math.inf, there), (0.3, there)]]) == [there, here, far]
    assert _most_wanted([[(0.2, far)], [(0.2, here)]]) == [here, far]
    many = [(0.01 * number, _Row(0, 0, number)) for number in range(100)]
    kept = [row.row for row in _most_wanted([many])]
    assert kept == list(range(99, 99 - len(kept), -1)) and 0 < len(kept) < 100


def test_rows_that_carry_a_notable_share_are_wanted_the_largest_first(context):
    result, shares = context.finding.result, context.finding.result.shares
    products = [torch.zeros_like(part) for part in shares.products]
    sizes = {(0, 1): 0.3, (2, 0): -0.6, (3, 2): 1e-6}
    for (index, row), size in sizes.items():
        products[index][row, 0] = size * shares.square

    def kept(is_trusted):
        changed = replace(result, shares=replace(shares, products=products, is_trusted=is_trusted))
        found = gathered(context, finding=replace(context.finding, result=changed))
        return [(sequence.micro_batch, sequence.micro_batch_row) for sequence in found.sequences]

    assert kept(is_trusted=True) == [(1, 1), (2, 0), (0, 1)] and kept(is_trusted=False) == [(1, 1)]


def test_a_low_entropy_is_a_low_quantile_of_the_tokens_that_were_looked_at(context):
    assert gathered(context).low_entropy is None
    mask = context.step.token_mask(0)
    entropies = torch.full(mask.shape, 99.0).masked_scatter(mask, torch.arange(int(mask.sum())).float())
    looked_at = gathered(context, finding=replace(context.finding, entropies={0: entropies}))
    assert looked_at.low_entropy == pytest.approx(0.2 * (int(mask.sum()) - 1))


def test_a_ratio_is_known_where_both_are_and_infinite_where_it_overflows():
    assert ratio(None, 0.0) is None and ratio(0.0, None) is None
    assert ratio(math.log(6.0), math.log(2.0)) == pytest.approx(3.0)
    assert ratio(699.0, 0.0) == pytest.approx(math.exp(699.0)) and ratio(700.0, 0.0) == math.inf


@pytest.mark.parametrize(
    ("taken", "limit", "scale", "is_taken"),
    [
        ("observe", 2.0, "norm", True),
        ("mask", 2.0, "after", True),
        ("mask", 0.01, "after", True),
        ("skip", 2.0, None, False),
        ("abort", 2.0, None, False),
        ("observe", math.inf, None, True),
    ],
)
def test_what_the_optimizer_was_given_is_told(context, taken, limit, scale, is_taken):
    event = gathered(context, action=Action(taken, taken, ""), clip_limit=limit).event
    found, after = event.consequence, event.certificate.norm_after
    given = {"norm": context.spike.grad_norm, "after": after, None: None}[scale]
    assert found.is_taken is is_taken and found.grad_clip == (None if limit == math.inf else limit)
    if given is None:
        assert found.clip_scale is None and found.healthy_norm is None
        return
    assert found.clip_scale == pytest.approx(min(1.0, limit / given), rel=1e-4)
    assert found.healthy_norm == pytest.approx(after * found.clip_scale)
    assert found.culprit_share == (0.0 if taken == "mask" else pytest.approx(event.culprits[0].share))
