# SPDX-License-Identifier: Apache-2.0
"""The adaptive threshold flags what is far over a run's own norms, learns new levels, and survives a checkpoint."""

import json
import math
import random
from pathlib import Path
from statistics import median

import pytest

from gradloc.record import History
from gradloc.trigger import AdaptiveThreshold, fixed_threshold, spike_kind

SERIES = sorted((Path(__file__).resolve().parents[2] / "docs" / "series").glob("*.json"))


def healthy(seed, steps, level=1.0, sigma=0.2):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(steps)]


def flagged(rule, norms):
    """The indices of the flagged norms of a run with one mini-batch a step."""
    return [step for step, norm in enumerate(norms) if rule.observe([norm])[0]]


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_is_flagged_once_and_leaves_the_threshold_where_it_was(seed):
    rule, norms = AdaptiveThreshold(), healthy(seed, 200)
    norms[150] = 54_648_652.0
    before = flagged(rule, norms[:150]) or rule.threshold(0)
    assert flagged(rule, norms[150:]) == [0]
    assert rule.threshold(0) == pytest.approx(before, rel=0.3)


def test_no_threshold_before_the_warm_up_but_a_norm_that_is_not_finite_is_a_spike_from_the_first_step():
    rule = AdaptiveThreshold(warmup=16)
    assert (
        rule.observe([math.nan]) == [True] and rule.observe([900.0]) == [False] and rule.observe([math.inf]) == [True]
    )
    assert flagged(rule, healthy(0, 14)) == [] and rule.threshold(0) is None
    rule.observe([1.0])
    assert rule.threshold(0) is not None


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_on_real_series_every_norm_over_ten_times_the_median_is_flagged_and_hardly_another(path):
    norms = [norm for _, norm in json.loads(path.read_text())["series"]]
    found = set(flagged(AdaptiveThreshold(), norms))
    over = {i for i in range(16, len(norms)) if norms[i] > 10 * median(norms[max(0, i - 64) : i])}
    assert over and over <= found
    assert len(found - over) <= 0.02 * (len(norms) - len(over))


def test_positions_of_a_step_have_thresholds_of_their_own():
    rule, columns = AdaptiveThreshold(), [healthy(seed, 100, level) for seed, level in enumerate((1.0, 4.0, 16.0))]
    assert not any(any(rule.observe(row)) for row in zip(*columns, strict=True))
    assert [rule.observe([8.0, 4.0, 16.0]), rule.observe([1.0, 32.0, 16.0])] == [
        [True, False, False],
        [False, True, False],
    ]


@pytest.mark.parametrize("growth", [1.25, 1.5, 2.0])
def test_a_collapse_is_flagged_from_the_cap_to_its_end_and_forgotten_at_once(growth):
    rule = AdaptiveThreshold()
    flagged(rule, healthy(0, 150))
    before = rule.threshold(0)
    for step in range(1, 100):
        norm = growth**step
        (is_spike,) = rule.observe([norm])
        assert is_spike or norm <= 11.0  # ten times a median that the first steps of the growth have moved a little
        assert rule.threshold(0) < 13.0
    assert rule.threshold(0) == pytest.approx(before, rel=0.5)


def test_a_level_that_stays_up_is_learnt_after_a_window_of_spikes_and_one_that_falls_within_sixteen_steps():
    rule = AdaptiveThreshold(window=64)
    flagged(rule, healthy(0, 100))
    assert flagged(rule, healthy(1, 120, level=50.0)) == list(range(64))
    assert flagged(rule, healthy(2, 17)) == [] and rule.threshold(0) < 10 * 1.5


def test_spikes_with_healthy_steps_between_them_are_no_new_level():
    rule = AdaptiveThreshold(window=16)
    flagged(rule, healthy(0, 100))
    assert all(flagged(rule, [50.0, *healthy(seed, 15)]) == [0] for seed in range(20))


def test_steps_with_and_without_advantages_are_two_kinds():
    rng = random.Random(0)
    norms = [norm * (0.01 if rng.random() < 0.6 else 1.0) for norm in healthy(0, 400)]
    rule = AdaptiveThreshold()
    assert len(flagged(rule, norms)) <= 4
    assert 4 <= rule.threshold(0) < 8


def test_a_summary_tells_the_level_and_how_far_the_larger_norms_lie_above_it():
    rule = AdaptiveThreshold()
    assert rule.summary() == History()
    flagged(rule, healthy(0, 100, level=3.0))
    found = rule.summary()
    assert found.num_norms == 64 and found.median_norm == pytest.approx(3.0, rel=0.1)
    assert found.log_sigma == pytest.approx(0.2, rel=0.3)
    flagged(rule, [2.0] * 64)
    assert rule.summary(0) == History(64, pytest.approx(2.0), 0.0)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_run_of_other_units_has_the_same_spikes_and_the_threshold_in_its_units(factor):
    norms = healthy(0, 80) + [30.0, 40.0] + healthy(1, 40, level=0.1) + [3.0] + healthy(2, 40, level=5.0)
    rule, other = AdaptiveThreshold(), AdaptiveThreshold()
    assert flagged(rule, norms) == flagged(other, [factor * norm for norm in norms])
    assert other.threshold(0) == pytest.approx(factor * rule.threshold(0))


@pytest.mark.parametrize(
    ("norm", "threshold", "kind"),
    [
        (5.0, 5.0, None),
        (5.1, 5.0, "adaptive"),
        (9e9, None, None),
        (math.nan, None, "non_finite"),
        (math.inf, math.inf, "non_finite"),
    ],
)
def test_a_norm_over_the_threshold_breaks_its_rule(norm, threshold, kind):
    assert spike_kind(norm, threshold, "adaptive") == kind


def test_a_step_without_a_gradient_says_nothing():
    with_zeros, without = AdaptiveThreshold(), AdaptiveThreshold()
    norms = healthy(0, 50)
    assert flagged(without, norms) == [] and flagged(with_zeros, [x for norm in norms for x in (norm, 0.0)]) == []
    assert with_zeros.threshold(0) == without.threshold(0)


@pytest.mark.parametrize("after", [0, 3, 40, 110, 130])
def test_a_run_goes_on_from_its_checkpoint_exactly(after):
    norms = healthy(0, 100) + [4.0**step for step in range(1, 31)] + healthy(1, 100)
    whole, first, second = AdaptiveThreshold(), AdaptiveThreshold(), AdaptiveThreshold()
    expected = [(whole.threshold(1), whole.observe([norm, 2 * norm])) for norm in norms]
    for norm in norms[:after]:
        first.observe([norm, 2 * norm])
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert all(len(kept) <= 64 for at in first.state()["positions"] for kept in (at["log_norms"], at["run"])), "bounded"
    assert [(second.threshold(1), second.observe([norm, 2 * norm])) for norm in norms[after:]] == expected[after:]


def test_the_published_threshold_is_tau_over_root_n():
    assert fixed_threshold(640.0, 16384) == 5.0
    assert fixed_threshold(640.0, 0) == math.inf
