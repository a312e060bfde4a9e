# SPDX-License-Identifier: Apache-2.0
"""A tiny run of the trigger's benchmark: it counts what it says it counts."""

import numpy as np
import pytest

from lab.benchmarks.trigger import series
from lab.benchmarks.trigger.__main__ import main, score_collapse, score_kind, score_real
from lab.benchmarks.trigger.rules import RULES, Multiple


def kind(name):
    return series.HEALTHY[name], list(series.HEALTHY).index(name)


def test_a_spike_is_planted_on_steps_with_a_gradient_and_nothing_else_is_touched():
    two_kinds, number = kind("60% of steps x 0.01")
    healthy = two_kinds(np.random.default_rng(number))
    planted, factors = series.plant(healthy, np.random.default_rng(0), rate=0.2, first=64)
    assert set(np.unique(factors)) == {1.0, 3.0, 10.0, 100.0}
    assert np.array_equal(planted, healthy.norms * factors)
    is_planted = (factors > 1).any(axis=1)
    assert not is_planted[:64].any() and healthy.is_spikable[is_planted].all()


def test_a_rule_that_never_flags_misses_all_and_one_that_always_does_flags_all():
    entry, number = kind("4 mini-batches, ramp 1 to 3")
    never = score_kind(entry, number, range(2), lambda: Multiple(factor=1e9))
    always = score_kind(entry, number, range(2), lambda: Multiple(factor=0.0, warmup=1))
    assert never["false_flags"]["worst"] == 0 and never["missed_x10"]["mean"] == 100
    assert always["false_flags"]["mean"] == pytest.approx(4000, abs=5) and always["missed_x3"]["worst"] == 0
    assert score_collapse(1.5, 2, 0, range(2), lambda: Multiple(factor=1e9))["unseen"]["median"] == 100


def test_over_ten_times_the_median_is_counted_apart_from_the_others():
    norms = [1.0] * 20 + [11.0, 1.0, 9.0]
    assert score_real(norms, lambda: Multiple(factor=8.0)) == {"over": 1, "missed": 0, "others": 22, "flagged": 1}


@pytest.mark.slow
def test_the_command_writes_every_rule_and_kind_and_the_seeds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(series, "HEALTHY", {"lognormal 0.2": kind("lognormal 0.2")[0]})
    assert main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "trigger.md").read_text()
    assert text in capsys.readouterr().out
    assert all(name in text for name in (*RULES, "verl-maze-actor", "lognormal 0.2", "x 1.25"))
    assert '"seeds"' in (tmp_path / "trigger.json").read_text()
