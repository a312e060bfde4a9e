# SPDX-License-Identifier: Apache-2.0
"""Ranks gather of a spike what the step has: its numbers at the culprit, its terms, what was taken."""

import math
from dataclasses import fields, replace

import pytest
import torch

from gradloc.core.ranks import Ranks
from gradloc.loop.gather import _Sums, _typical, raw_event
from gradloc.record import Action, Cured, History, Step, Trigger
from tests.toy_model import Loss, ToyStep, build, random_batch, shard
from tests.toy_model.events import context_of

PLACE, M, THRESHOLD = (5, 2), 4, 20.0
LOSS = Loss(entropy=0.02, kl=0.05)


@pytest.fixture(scope="module")
def context():
    model = shard(build("tiny"), "plain")
    batch = random_batch(model).planted({PLACE: 1e4})
    made = context_of(ToyStep(model, batch, M, loss=LOSS), batch, THRESHOLD)
    return replace(
        made,
        spike=replace(made.spike, history=History(9, 1.5, 0.2)),
        place=Step(7, 1, 2, 3, stage="low"),
        clip_limit=2.0,
        checkpoint="/ckpt",
        head_square=9.0,
        budget=128,
    )


def gathered(context, **changes):
    return raw_event(replace(context, **changes))


def test_the_culprit_has_the_step_s_own_numbers(context):
    (found,) = gathered(context).event.culprits
    step, index, row = context.step, 1, 1
    at = (row, PLACE[1])
    recorded = step.recorded(index)
    log_prob, entropy = step.coefficients(index)
    assert (found.row, found.micro_batch, found.micro_batch_row, found.positions, found.peak) == (5, 1, 1, (2,), 2)
    assert found.at("log_prob") == pytest.approx(float(recorded.log_prob[at]))
    assert found.at("old_log_prob_used") == pytest.approx(float(step.details(index).old_log_prob[at]))
    assert found.at("entropy") == pytest.approx(float(recorded.entropy[at]))
    assert found.at("coefficient") == pytest.approx(float(log_prob[at]))
    assert found.at("kl_coefficient") == pytest.approx(float(step.kl_coefficients(index)[at]))
    ranks = Ranks()
    ranks.size = 2
    (on_two_ranks,) = gathered(context, ranks=ranks).event.culprits
    assert on_two_ranks.at("kl_coefficient") == pytest.approx(found.at("kl_coefficient") / 2), (
        "the loss is a mean over ranks"
    )
    assert found.at("entropy_coefficient") == pytest.approx(float(entropy[at]))
    assert found.at("loss_weight") == pytest.approx(float(step.token_weights(index)[at]))
    mask = step.token_mask(index)[row]
    ratios = (recorded.log_prob - step.details(index).old_log_prob)[row][mask]
    assert found.sequence_ratio == pytest.approx(math.exp(float(ratios.mean())), rel=1e-5)
    assert found.is_exact and found.share_error == 0.0 and found.token_norms == (found.grad_norm,)
    assert math.hypot(*found.layers.values()) == pytest.approx(found.grad_norm, rel=1e-4)


def test_where_it_was_and_how_it_was_dealt_out(context):
    event = gathered(context).event
    assert event.step == replace(context.place, num_micro_batches=M, world_size=1, dp_size=1, sp_size=1)
    assert event.head_grad_norm == 3.0 and event.model is None and event.search.budget == 128
    assert math.hypot(*event.layers.values()) == pytest.approx(context.spike.grad_norm, rel=1e-5)
    assert math.hypot(*event.kinds.values()) == pytest.approx(context.spike.grad_norm, rel=1e-5)
    meta = gathered(context).meta
    assert (meta.checkpoint, meta.temperature, meta.loss_scale, meta.dtype) == ("/ckpt", 1.0, 1.0, "float32")
    assert meta.has_beside is False and meta.fingerprint.total[0] > 0
    assert event.trigger == Trigger(**vars(context.spike)) and event.trigger.history.median_norm == 1.5


def test_terms_are_roots_of_all_tokens_squares_and_the_residual_leaves_the_culprits_out(context):
    event, step = gathered(context).event, context.step
    squares = dict.fromkeys(("policy", "kl", "entropy", "all"), 0.0)
    for index in range(M):
        mask = step.token_mask(index)
        log_prob, entropy = step.coefficients(index)
        kl = step.kl_coefficients(index)
        for name, values in (("policy", log_prob - kl), ("kl", kl), ("entropy", entropy), ("all", log_prob)):
            squares[name] += float(values[mask].double().square().sum())
    for name, found in (("kl", event.batch.kl_over_policy), ("entropy", event.batch.entropy_over_policy)):
        assert found == pytest.approx((squares[name] / squares["policy"]) ** 0.5, rel=1e-5), name
    residual = (squares["all"] - event.culprits[0].at("coefficient") ** 2) ** 0.5
    assert event.batch.jacobian == pytest.approx(event.certificate.norm_after / residual, rel=1e-3)
    assert event.batch.layer_spread is None


def part(policy=1.0, kl=0.0, residual=0.25, low=None):
    squares = {"policy": policy, "kl": kl, "entropy": 0.0}
    none: dict = {field.name: [] for field in fields(_Sums)}
    return _Sums(**(none | {"coefficient_square": residual, "term_squares": squares, "low_entropy": low}))


def test_what_is_typical_is_of_all_ranks():
    found = _typical([part(3.0, 1.0, 0.25, 0.1), part(1.0, 3.0, 0.75, 0.3), part(0.0, 0.0, 0.0, 0.2)], 6.0, 7.0)
    assert (found.kl_over_policy, found.jacobian, found.low_entropy, found.layer_spread) == (1.0, 6.0, 0.2, 7.0)


def test_every_row_says_what_it_carries_and_of_shares_that_are_not_trusted_none_does(context):
    rows, shares, step = gathered(context).row_shares, context.finding.shares, context.step
    assert [found.row for found in rows] == list(range(4 * M)) and rows[5].share > 0.9
    assert sum(found.share for found in rows) == pytest.approx(shares.closure)
    assert sum(found.num_tokens for found in rows) == sum(int(step.token_mask(index).sum()) for index in range(M))
    assert rows[5].variance == pytest.approx(float((shares.errors[1][1] / shares.square).square().sum()))
    for none in (None, replace(shares, is_exact=False)):
        assert gathered(context, finding=replace(context.finding, shares=none)).row_shares == ()


def test_shares_are_summed_by_micro_batch_and_the_culprit_s_row_is_kept_token_by_token(context):
    raw, shares = gathered(context), context.finding.shares
    sums = [float(shares.shares(index).sum()) for index in range(M)]
    assert [of_rank for (of_rank,) in raw.event.shares.micro_batches] == pytest.approx(sums)
    (kept,) = [sequence for sequence in raw.sequences if sequence.row == 5]
    assert kept.columns["log_prob"] == pytest.approx(context.step.recorded(1).log_prob[1].tolist())
    assert kept.columns["coefficient"] == pytest.approx(context.step.coefficients(1)[0][1].tolist())
    assert kept.columns["share"] == pytest.approx(shares.shares(1)[1].tolist())
    assert kept.columns["share_error"] == pytest.approx((shares.errors[1] / shares.square)[1].tolist())
    assert [(entry.micro_batch, entry.rows) for entry in raw.layout] == [(1, [4, 5, 6, 7])]
    full = gathered(context, keeps_all=True).layout
    assert [entry.micro_batch for entry in full] == [0, 1, 2, 3]
    for entry in full:
        log_prob, entropy = context.step.coefficients(entry.micro_batch)
        assert (entry.log_prob_coefficients == log_prob.numpy()).all() and entry.log_prob_coefficients.any()
        assert (entry.entropy_coefficients == entropy.numpy()).all() and entry.entropy_coefficients.any()


def test_each_token_of_a_span_has_the_least_norm_that_its_share_says(context):
    shares = context.finding.shares
    (culprit,) = context.finding.culprits
    span = replace(culprit, span="segment", start=culprit.start - 1, share=None)

    def found(shares):
        finding = replace(context.finding, culprits=[span], shares=shares)
        event = gathered(context, finding=finding).event
        assert event.consequence.culprit_share == event.culprits[0].share
        return event.culprits[0]

    products, errors = shares.products[1][1, [1, 2]], shares.errors[1][1, [1, 2]]
    assert found(shares).positions == (1, 2) and found(shares).peak == 2
    assert found(shares).token_norms == pytest.approx((products.abs() / shares.square**0.5).tolist())
    assert found(shares).share == pytest.approx(float(products.sum()) / shares.square)
    assert found(shares).share_error == pytest.approx(float(errors.norm()) / shares.square)
    for none in (None, replace(shares, is_exact=False)):
        assert found(none).token_norms is None and found(none).share is found(none).share_error is None


def test_rows_that_carry_a_notable_share_are_wanted_the_largest_first(context):
    shares = context.finding.shares
    products = [torch.zeros_like(part) for part in shares.products]
    sizes = {(0, 1): 0.3, (2, 0): -0.6, (3, 2): 1e-6}
    for (index, row), size in sizes.items():
        products[index][row, 0] = size * shares.square

    def kept(is_trusted):
        changed = replace(shares, products=products, is_exact=is_trusted)
        found = gathered(context, finding=replace(context.finding, shares=changed))
        return [(sequence.micro_batch, sequence.micro_batch_row) for sequence in found.sequences]

    assert kept(is_trusted=True) == [(1, 1), (2, 0), (0, 1)] and kept(is_trusted=False) == [(1, 1)]


def test_a_low_entropy_is_a_low_quantile_of_the_tokens_that_were_looked_at(context):
    assert gathered(context).event.batch.low_entropy is None
    mask = context.step.token_mask(0)
    entropies = torch.full(mask.shape, 99.0).masked_scatter(mask, torch.arange(int(mask.sum())).float())
    looked_at = gathered(context, finding=replace(context.finding, entropies={0: entropies}))
    assert looked_at.event.batch.low_entropy == pytest.approx(0.2 * (int(mask.sum()) - 1))


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


def test_a_healed_step_was_given_the_norm_under_the_first_setting_that_heals(context):
    cures = [Cured("gspo", verdict="not_healed", norm_after=9.0)]
    cures += [Cured(name, verdict="healed", norm_after=norm) for name, norm in (("clip", 4.0), ("cispo", 3.0))]
    finding = replace(context.finding, cures=cures)
    found = gathered(context, action=Action("heal", "heal", ""), finding=finding).event.consequence
    assert found.is_taken and found.clip_scale == pytest.approx(2.0 / 4.0)
    assert found.culprit_share is None is found.healthy_norm
