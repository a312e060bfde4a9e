# SPDX-License-Identifier: Apache-2.0
"""The formulas and the split, against loops that anyone can read; and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from gradloc.reweighting.advantages import kept_share, reweight
from gradloc.reweighting.config import LoptiConfig
from gradloc.reweighting.stages import Lopti, split

ROOT = Path(__file__).resolve().parents[2]

LOG_PROB = [[-0.01, -2.0, -0.7, -5.0], [-0.3, -0.3, -0.1, -9.0], [-1.0, -0.9, 0.0, -0.69]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
ADVANTAGES = [[1.0, -2.0, 0.5, 0.0], [3.0, 3.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]]


def call(*calls, log_prob=LOG_PROB):
    """Each call's answer: {"alpha": ...} reweights, anything else is Lopti's settings."""
    log_prob, mask = torch.tensor(log_prob), torch.tensor(MASK)
    answers = []
    for settings in calls:
        if "alpha" in settings:
            answers.append(reweight(torch.tensor(ADVANTAGES), log_prob, settings["alpha"]).tolist())
        else:
            stages = split(log_prob, mask, LoptiConfig(enable=True, **settings))
            answers.append([[stage.name, stage.mask.tolist()] for stage in stages])
    return answers


def test_an_advantage_is_scaled_by_the_tokens_probability():
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
def test_the_stages_are_the_tokens_below_the_threshold_and_the_rest_in_the_order_of_its_sign(eta):
    from math import exp

    ((first, second),) = call({"eta": eta})
    low, high = slow_split(lambda log_prob: exp(log_prob) < abs(eta))
    expected = [["low", low], ["high", high]]
    assert [first, second] == (expected if eta > 0 else expected[::-1])


@pytest.mark.parametrize("quantile", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("eta", [0.5, 0, -0.5])
def test_a_quantile_splits_the_batchs_own_tokens_in_that_proportion(quantile, eta):
    from math import exp

    ((first, second),) = call({"eta": eta, "quantile": quantile})
    flat = [p for row, m in zip(LOG_PROB, MASK, strict=True) for p, on in zip(row, m, strict=True) if on]
    threshold = sorted(exp(p) for p in flat)[int(quantile * len(flat))]
    low, high = slow_split(lambda log_prob: exp(log_prob) < threshold * (1 - 1e-7))
    expected = [["low", low], ["high", high]]
    assert [first, second] == (expected if eta >= 0 else expected[::-1])


def test_the_stages_are_disjoint_and_complete_even_with_a_probability_that_is_no_number():
    log_prob = [[float("nan"), -2.0, -0.7, -5.0], *LOG_PROB[1:]]
    ((_, first), (_, second)) = call({"eta": 0.5}, log_prob=log_prob)[0]
    for row, mask in enumerate(MASK):
        for position, is_token in enumerate(mask):
            assert first[row][position] + second[row][position] == is_token


def test_what_is_kept_is_the_share_of_all_response_tokens_advantages():
    before, mask = torch.tensor(ADVANTAGES), torch.tensor(MASK).bool()
    before[0, 3] = 1e6  # no response token
    assert kept_share(before, -0.25 * before, mask) == 0.25
    assert kept_share(torch.zeros(3, 4), torch.ones(3, 4), mask) == 1.0, "nothing there was nothing to lose"


# ---- the two updates


def updated(log_prob=LOG_PROB, outputs=None, **settings):
    """What Lopti asks of the actor, (stage, whether the learning rate stays), and the metrics that it makes of it."""
    asked = []

    def update(stage, keeps_lr):
        asked.append((stage.name, keeps_lr))
        return outputs[stage.name] if outputs else {}

    lopti = Lopti(LoptiConfig(enable=True, **settings))
    return asked, lopti.update(torch.tensor(log_prob), torch.tensor(MASK), update)


def test_two_updates_advance_the_learning_rate_once_unless_each_is_to():
    assert updated()[0] == [("low", True), ("high", False)]
    assert updated(eta=-0.5)[0] == [("high", True), ("low", False)]
    assert updated(step_lr_each_stage=True)[0] == [("low", False), ("high", False)]


def test_a_stage_without_tokens_is_left_out_and_said_so(caplog):
    for likely, name, empty in ((-0.1, "high", "low"), (-3.0, "low", "high")):
        asked, metrics = updated([[likely] * 4] * 3)
        assert asked == [(name, False)] and f"no {empty}-probability token" in caplog.text
        assert (metrics[f"lopti/{name}/share"], metrics[f"lopti/{empty}/share"]) == ([1.0], [0.0])
        caplog.clear()
    updated()
    assert not caplog.text


def test_losses_of_the_stages_add_up_and_other_values_stand_side_by_side():
    outputs = {
        "low": {"actor/pg_loss": [1.0, 2.0], "actor/kl_loss": [[1.0], [2.0]], "actor/grad_norm": [3.0], "other": [1]},
        "high": {"actor/pg_loss": [10.0, 20.0], "actor/kl_loss": [[4.0], [8.0]], "actor/grad_norm": [5.0]},
    }
    _, metrics = updated(outputs=outputs)
    assert (metrics["actor/pg_loss"], metrics["actor/kl_loss"]) == ([11.0, 22.0], [[5.0], [10.0]])
    assert (metrics["actor/grad_norm"], metrics["other"]) == ([3.0, 5.0], [1])
    assert (metrics["lopti/low/pg_loss"], metrics["lopti/high/grad_norm"]) == ([1.0, 2.0], [5.0])
    assert "lopti/low/other" not in metrics
    shares = [metrics[f"lopti/{stage}/share"] for stage in ("low", "high")]
    assert shares == [[pytest.approx(4 / 9)], [pytest.approx(5 / 9)]]


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


@pytest.mark.parametrize(
    ("eta", "each", "names", "keeps"),
    [
        (0.5, False, ["low", "high"], [True, False]),
        (-0.5, False, ["high", "low"], [True, False]),
        (0.5, True, ["low", "high"], [False, False]),
        (1e-9, False, ["high"], [False]),
    ],
)
def test_the_schedule_advances_with_the_last_stage_or_with_each_and_metrics_are_told_apart_and_together(
    eta, each, names, keeps
):
    told = []

    def update(stage, is_kept):
        told.append((stage.name, is_kept))
        size = 10.0 ** len(told)
        return {"actor/pg_loss": [[size, 2 * size]], "actor/grad_norm": [size], "gradloc/spikes": [1]}

    lopti = Lopti(LoptiConfig(enable=True, eta=eta, step_lr_each_stage=each))
    found = lopti.update(torch.tensor(LOG_PROB), torch.tensor(MASK), update)
    assert told == list(zip(names, keeps, strict=True))
    sizes = [10.0 ** (number + 1) for number in range(len(names))]
    assert found["actor/grad_norm"] == sizes and found["gradloc/spikes"] == [len(names)]
    assert found["actor/pg_loss"] == [[sum(sizes), 2 * sum(sizes)]]
    assert [found[f"lopti/{name}/grad_norm"] for name in names] == [[size] for size in sizes]
    assert found["lopti/low/share"][0] + found["lopti/high/share"][0] == pytest.approx(1.0)
