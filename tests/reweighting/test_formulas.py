# SPDX-License-Identifier: Apache-2.0
"""The formulas and the split, against loops that anyone can read; and what is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

LOG_PROB = [[-0.01, -2.0, -0.7, -5.0], [-0.3, -0.3, -0.1, -9.0], [-1.0, -0.9, 0.0, -0.69]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
ADVANTAGES = [[1.0, -2.0, 0.5, 0.0], [3.0, 3.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]]


@pytest.fixture
def call(world):
    """Each call's answer: {"alpha": ...} reweights, anything else is Lopti's settings."""

    def run(*calls, log_prob=LOG_PROB):
        arguments = dict(log_prob=log_prob, mask=MASK, advantages=ADVANTAGES, calls=calls)
        return world.run("tests.reweighting.scenarios.formulas", **arguments)[0]

    return run


def test_an_advantage_is_scaled_by_the_tokens_probability(call):
    from math import exp

    alphas = [0.0, 0.1, 0.3, 1.0]
    for alpha, found in zip(alphas, call(*[{"alpha": alpha} for alpha in alphas]), strict=True):
        for row, log_probs in enumerate(LOG_PROB):
            for position, log_prob in enumerate(log_probs):
                weight = alpha * exp(log_prob) + (1 - alpha)
                expected = weight * ADVANTAGES[row][position]
                assert found[row][position] == pytest.approx(expected, rel=1e-6)


def slow_split(is_low):
    low = [[bool(m) and is_low(p) for m, p in zip(*rows, strict=True)] for rows in zip(MASK, LOG_PROB, strict=True)]
    high = [
        [bool(m) and not is_low(p) for m, p in zip(*rows, strict=True)] for rows in zip(MASK, LOG_PROB, strict=True)
    ]
    return low, high


@pytest.mark.parametrize("eta", [0.5, 0.9, -0.5, -0.05])
def test_the_stages_are_the_tokens_below_the_threshold_and_the_rest_in_the_order_of_its_sign(call, eta):
    from math import exp

    ((first, second),) = call({"eta": eta})
    low, high = slow_split(lambda log_prob: exp(log_prob) < abs(eta))
    expected = [["low", low], ["high", high]]
    assert [first, second] == (expected if eta > 0 else expected[::-1])


@pytest.mark.parametrize("quantile", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("eta", [0.5, 0, -0.5])
def test_a_quantile_splits_the_batchs_own_tokens_in_that_proportion(call, quantile, eta):
    from math import exp

    ((first, second),) = call({"eta": eta, "quantile": quantile})
    flat = [p for row, m in zip(LOG_PROB, MASK, strict=True) for p, on in zip(row, m, strict=True) if on]
    threshold = sorted(exp(p) for p in flat)[int(quantile * len(flat))]
    low, high = slow_split(lambda log_prob: exp(log_prob) < threshold * (1 - 1e-7))
    expected = [["low", low], ["high", high]]
    assert [first, second] == (expected if eta >= 0 else expected[::-1])


def test_the_stages_are_disjoint_and_complete_even_with_a_probability_that_is_no_number(call):
    log_prob = [[float("nan"), -2.0, -0.7, -5.0], *LOG_PROB[1:]]
    ((_, first), (_, second)) = call({"eta": 0.5}, log_prob=log_prob)[0]
    for row, mask in enumerate(MASK):
        for position, is_token in enumerate(mask):
            assert first[row][position] + second[row][position] == is_token


WRONG = [
    ("algorithm.advantage_reweighting.alpha=1.5", "alpha must be a number from 0 (off) to 1, found 1.5"),
    ("algorithm.advantage_reweighting.alpha=-0.1", "alpha must be a number from 0 (off) to 1"),
    ("algorithm.lopti.eta=1", "lopti.eta must be a number between -1 and 1, exclusive, found 1"),
    ("algorithm.lopti.eta=-1.0", "lopti.eta must be a number between -1 and 1, exclusive"),
    ("algorithm.lopti.eta=0", "lopti.quantile must be set while algorithm.lopti.eta is 0"),
    ("algorithm.lopti.quantile=0", "lopti.quantile must be null or a number between 0 and 1"),
    ("algorithm.lopti.quantile=1", "lopti.quantile must be null or a number between 0 and 1"),
    ("algorithm.lopti.enable=3", "lopti.enable must be true or false, found 3"),
]


def test_every_setting_is_documented_with_its_default_in_both_trainers_configs(patched_tree):
    page = (ROOT / "docs" / "reweighting.md").read_text()
    documented = dict(re.findall(r"^\| `(algorithm[a-z_.]+)` \| `([^`]*)` \|", page, flags=re.M))
    for trainer in ("ppo_trainer", "ppo_megatron_trainer"):
        path = f"verl/trainer/config/_generated_{trainer}.yaml"
        algorithm = yaml.safe_load((patched_tree / path).read_text())["algorithm"]
        found = {}
        for block in ("advantage_reweighting", "lopti"):
            for key, value in algorithm[block].items():
                if key != "_target_":
                    found[f"algorithm.{block}.{key}"] = json.dumps(value)
        assert found == documented


def test_wrong_settings_are_refused_by_name_and_right_ones_are_taken(single):
    right = [[], ["algorithm.advantage_reweighting.alpha=0.3"], ["algorithm.lopti.enable=true"]]
    engine = ["algorithm.lopti.enable=true", "trainer.use_legacy_worker_impl=disable"]
    size = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    cases = [[size, *case] for case in ([[override] for override, _ in WRONG] + right + [engine])]
    answers = single.run("configs.read_all", cases=cases, read="tests.world.configs.reweighting")[0]
    for (override, expected), answer in zip(WRONG, answers, strict=False):
        assert expected in answer["error"], override
    assert answers[len(WRONG) : -1] == ["nothing is on", "on", "on"]
    assert (
        "trainer.use_legacy_worker_impl must be auto or enable while algorithm.lopti.enable is on"
        in answers[-1]["error"]
    )
