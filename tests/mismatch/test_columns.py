# SPDX-License-Identifier: Apache-2.0
"""What is taken, and what is refused in one sentence."""

import numpy as np
import pytest

from gradloc.mismatch import MismatchError, columns, judge
from gradloc.mismatch.stats import LAGS, Tokens, dependence, identity, moves, partners, ranks, row_scales, unevenness

B = np.log(np.random.default_rng(0).uniform(0.05, 1, (20, 30)))


@pytest.mark.parametrize(
    "rollout, trainer, mask, said",
    [
        (B, B[:, 1:], None, r"trainer has 580 values in 20 rows, the rollout's log-probs 600 in 20 \(row 0\)"),
        (B[:2], B[:2], None, "The columns have 60 tokens, and a verdict needs 200"),
        (B, B, B > 0, "leaves 0 tokens"),
        (np.exp(B), B, None, "100% of the log-probs of the rollout engine are above 0 .*probabilities"),
        (B, B * np.nan, None, "600 of 600 log-probs of the trainer are not finite"),
        (B * 0, B, None, "all log-probs of the rollout engine are 0: it returned none"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(rollout, trainer, mask, said):
    with pytest.raises(MismatchError, match=said) as told:
        columns(rollout, trainer, mask)
    assert "\n" not in str(told.value)


def test_of_a_row_one_value_is_wanted():
    with pytest.raises(MismatchError, match="group has 3 values, and there are 20 rows"):
        columns(B, B, group=[1, 2, 3])


def test_places_count_what_the_mask_leaves_out():
    mask = np.ones(B.shape, bool)
    mask[3, :10] = mask[5] = False
    made = columns(B, B, mask, ids=np.arange(B.size).reshape(B.shape), group=list("ab") * 10, prompt=range(20))
    assert len(made) == 600 - 40
    assert made.place[made.row == 3][0] == 10
    assert made.row.max() == 18 and sorted(set(made.order)) == [row for row in range(20) if row != 5]
    assert made.ids[made.row == 3][0] == 100
    assert set(made.group[made.row == 3]) == {1} and set(made.prompt[made.row == 3]) == {3}


def test_rows_may_have_any_length():
    rows = [B[0, : 10 + at] for at in range(20)]
    assert len(columns(rows, rows)) == sum(map(len, rows))


def test_the_numbers_are_what_loops_would_give():
    mask = np.random.default_rng(1).random(B.shape) > 0.2
    noisy = B + 0.05 * np.random.default_rng(2).standard_normal(B.shape)
    made = columns(B, noisy, mask, ids=np.random.default_rng(3).integers(12, size=B.shape))
    tokens = Tokens(made)
    keys = list(zip(made.row.tolist(), made.place.tolist(), strict=True))
    there = {key: at for at, key in enumerate(keys)}
    for lag in (-2, 1):
        np.testing.assert_array_equal(partners(made, lag), [there.get((row, place + lag), -1) for row, place in keys])
    sizes = [np.abs(tokens.z[made.row == row]) for row in range(20)]
    slow = [np.sort(z)[int(0.7 * (len(z) - 1))] for z in sizes]
    np.testing.assert_allclose(row_scales(tokens, np.ones(len(made), bool)), slow)
    z = np.clip(tokens.z, -6 * tokens.scale, 6 * tokens.scale)
    pairs = [z[at] * z[there[row, place + 1]] for at, (row, place) in enumerate(keys) if (row, place + 1) in there]
    found = dependence(tokens)
    assert found["neighbours"] == pytest.approx(np.mean(pairs) / np.mean(z**2))
    between = sum(z[made.ids == each].sum() ** 2 / (made.ids == each).sum() for each in range(12))
    assert found["by_id"] == pytest.approx((between - (z**2).mean() * 12) / (z**2).sum())
    assert identity(tokens.d)["mean_ratio"] == pytest.approx(np.mean([np.exp(d) for d in made.difference]))


def test_the_stretch_that_moves_is_the_one_that_a_search_of_all_finds():
    random = np.random.default_rng(5)
    moved = np.where(np.arange(30) >= random.integers(0, 20, (20, 1)), np.roll(B, 1, 1), B)
    tokens = Tokens(columns(moved, B, random.random(B.shape) > 0.2))
    lags, gains = moves(tokens)
    a, b = (ranks(each) / len(tokens) for each in (tokens.columns.trainer, tokens.columns.rollout))
    for row in range(20):
        own = np.flatnonzero(tokens.row == row)
        best = (0.0, 0, 0, 0)
        for lag in LAGS:
            there = partners(tokens.columns, lag)
            heals = np.where(there < 0, 0, np.abs(a - b) - np.abs(a - b[there]))[own]
            sums = [(heals[i:j].sum(), lag, i, j) for i in range(len(own)) for j in range(i + 1, len(own) + 1)]
            best = max(best, max(sums), key=lambda each: each[0])
        assert gains[row] == pytest.approx(best[0], abs=1e-9)
        marked = lags[own][best[2] : best[3]]
        assert np.mean(marked == best[1]) > 0.8 and (lags[own] != 0).sum() <= len(marked) + 6, "equal sums aside"


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.0])
def test_tokens_of_two_models_tilt_to_no_side_and_a_cut_sampler_s_do(spread):
    """By weights alone d is normal around -s^2 / 2 with spread s, whatever else mixes in: E[exp(d)] = 1."""
    sizes = spread * np.random.default_rng(7).exponential(1.0, 40_000)
    d = sizes * np.random.default_rng(8).standard_normal(40_000) - sizes**2 / 2
    found, cut = identity(d), identity(d + np.log(0.7))
    assert abs(found["tilt"]) < 0.02 and abs(found["tilt_sigma"]) < 3
    assert cut["tilt"] < -0.3 and cut["tilt_sigma"] < -50
    assert identity(np.full(40_000, np.log(0.7)))["tilt"] == pytest.approx(-1)


@pytest.mark.parametrize("rows", [40, 4000])
def test_a_cut_sampler_is_told_in_small_batches_and_in_large_ones(rows):
    """The highest of many draws of noise are higher: they are no sign of a second kind."""
    random = np.random.default_rng(11)
    trainer = np.log(0.7 * random.beta(2, 1, (rows, 60)))
    noise = 0.11 * -np.expm1(trainer) * random.standard_normal(trainer.shape)
    mass = random.choice([1.0, 0.8], trainer.shape)
    assert judge(columns(trainer + noise - np.log(mass), trainer, np.ones(trainer.shape))).name == "truncated"


def test_prompts_differ_where_their_tokens_ids_do_not_tell():
    random = np.random.default_rng(9)
    ids, group = random.integers(0, 40, (48, 100)), np.repeat(range(12), 4)
    by_id = random.standard_normal(40)[ids]  # alike in all prompts, as other weights have it
    strange = np.where(group < 3, 3.0, 1.0)[:, None] * random.standard_normal(ids.shape)
    one, other = (
        unevenness(Tokens(columns(np.full(ids.shape, -9.0), -9.0 + 0.1 * d, np.ones(ids.shape), ids=ids, group=group)))
        for d in (by_id + random.standard_normal(ids.shape), by_id + strange)
    )
    assert one["prompts"] < 0.1 and abs(one["prompts_sigma"]) < 4
    assert other["prompts"] > 0.4 and other["prompts_sigma"] > 20


def test_rows_that_differ_by_more_than_chance_have_that_spread():
    random = np.random.default_rng(6)
    z = random.standard_normal((400, 200))
    sizes = 1 + 0.3 * random.standard_normal((400, 1))
    even, uneven = (
        unevenness(Tokens(columns(each, each + 0.01 * z * scale, np.ones(z.shape))))
        for each, scale in ((np.full(z.shape, -20.0), 1), (np.full(z.shape, -20.0), sizes))
    )
    assert abs(even["uneven_sigma"]) < 4 and even["uneven"] < 0.03
    assert uneven["uneven"] == pytest.approx(np.std(sizes), rel=0.1) and uneven["uneven_sigma"] > 50


def test_noise_of_a_million_tokens_is_still_noise():
    random = np.random.default_rng(4)
    b = -random.exponential(1.5, (1000, 200))
    a = b + 0.07 * random.standard_normal(b.shape) * -np.expm1(b)
    assert judge(columns(b, np.minimum(a, 0), ids=random.integers(5000, size=b.shape))).name == "noise"


def test_a_few_tokens_that_differ_by_nats_are_no_noise():
    random = np.random.default_rng(4)
    b = -random.exponential(1.5, (40, 200))
    a = np.minimum(b + 0.07 * random.standard_normal(b.shape) * -np.expm1(b), 0)
    assert judge(columns(b, a)).is_healthy
    a[3, 7] -= 5.22
    verdict = judge(columns(b, a))
    assert not verdict.is_healthy and verdict.name == "cannot tell" and verdict.worst > 5
    assert "5.2" in verdict.why_not
