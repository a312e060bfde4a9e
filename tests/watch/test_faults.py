# SPDX-License-Identifier: Apache-2.0
"""Spoiled tokens of loops of every kind are named, certified and masked, and no innocent is."""

from functools import cache

import pytest

from lab.experiments.environment import CACHE
from tests.watch import faults, pretrained
from tests.watch.test_harmless import named
from tests.world.events import events_in

SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 3 else []) for seed in range(20)]
CASES = [pytest.param(kind, *seed.values, marks=seed.marks) for kind in ("sft", "dpo", "grpo") for seed in SEEDS]
CASES += [(kind, seed) for kind in ("weighted", "k1", "k3") for seed in range(2)]


@cache
def smollm2():
    """A pretrained model of 135 M weights, Python's reference as its text, and how loud a healthy step is."""
    folder = pretrained.folder(CACHE)
    return {"make": lambda _: pretrained.Pretrained(folder), "text": pretrained.text(folder), "loudness": 40.0}


def check(folder, kind, seed, **language):
    planted, norm = faults.step_of(kind, seed, folder, **language)
    (event,) = events_in(folder)
    assert named(event) == [planted]
    assert event["certificate"]["verdict"] == "explained" and event["action"]["taken"] == "mask"
    assert norm < event["trigger"]["threshold"] < event["trigger"]["grad_norm"]


@pytest.mark.parametrize("kind, seed", CASES)
def test_the_spoiled_token_is_named_and_no_other(tmp_path, kind, seed):
    check(tmp_path, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_so_it_is_on_a_pretrained_model(tmp_path, kind, seed):
    check(tmp_path, kind, seed, **smollm2())


@pytest.mark.parametrize("kind", faults.TAUS)
def test_a_healthy_step_is_no_spike(tmp_path, kind):
    faults.step_of(kind, 0, tmp_path, is_spoiled=False)
    assert events_in(tmp_path) == []
