# SPDX-License-Identifier: Apache-2.0
"""The formulas and the split, against loops that anyone can read; and what is refused."""

from math import exp

import pytest
import torch

from gradloc.reweighting.advantages import kept_share, reweight
from gradloc.reweighting.config import LoptiConfig
from gradloc.reweighting.stages import split, update_in_stages

LOG_PROB = [[-0.01, -2.0, -0.7, -5.0], [-0.3, -0.3, -0.1, -9.0], [-1.0, -0.9, 0.0, -0.69]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
ADVANTAGES = [[1.0, -2.0, 0.5, 0.0], [3.0, 3.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]]


def stages_of(log_prob=LOG_PROB, **settings):
    stages = split(torch.tensor(log_prob), torch.tensor(MASK), LoptiConfig(enable=True, **settings))
    return [(stage.name, stage.mask.tolist()) for stage in stages]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 1.0])
def test_an_advantage_is_scaled_by_the_tokens_probability(alpha):
    found = reweight(torch.tensor(ADVANTAGES), torch.tensor(LOG_PROB), alpha).tolist()
    for row, log_probs in enumerate(LOG_PROB):
        for position, log_prob in enumerate(log_probs):
            expected = (alpha * exp(log_prob) + (1 - alpha)) * ADVANTAGES[row][position]
            assert found[row][position] == pytest.approx(expected, rel=1e-6)


def slow_split(threshold, is_low_first):
    rows = [list(zip(mask, row, strict=True)) for mask, row in zip(MASK, LOG_PROB, strict=True)]
    low = [[bool(m) and exp(p) < threshold for m, p in row] for row in rows]
    high = [[bool(m) and exp(p) >= threshold for m, p in row] for row in rows]
    return [("low", low), ("high", high)][:: 1 if is_low_first else -1]


@pytest.mark.parametrize("eta", [0.5, 0.9, -0.5, -0.05])
def test_the_stages_are_the_tokens_below_the_threshold_and_the_rest_in_the_order_of_its_sign(eta):
    assert stages_of(eta=eta) == slow_split(abs(eta), eta > 0)


@pytest.mark.parametrize("quantile", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("eta", [0.5, 0, -0.5])
def test_a_quantile_splits_the_batchs_own_tokens_in_that_proportion(quantile, eta):
    flat = [p for row, m in zip(LOG_PROB, MASK, strict=True) for p, on in zip(row, m, strict=True) if on]
    threshold = sorted(exp(p) for p in flat)[int(quantile * len(flat))]
    assert stages_of(eta=eta, quantile=quantile) == slow_split(threshold * (1 - 1e-7), eta >= 0)


def test_the_stages_are_disjoint_and_complete_even_with_a_probability_that_is_no_number():
    (_, first), (_, second) = stages_of([[float("nan"), -2.0, -0.7, -5.0], *LOG_PROB[1:]], eta=0.5)
    assert (torch.tensor(first).int() + torch.tensor(second).int()).tolist() == MASK


def test_what_is_kept_is_the_share_of_all_response_tokens_advantages():
    before, mask = torch.tensor(ADVANTAGES), torch.tensor(MASK).bool()
    before[0, 3] = 1e6  # no response token
    assert kept_share(before, -0.25 * before, mask) == 0.25
    assert kept_share(torch.zeros(3, 4), torch.ones(3, 4), mask) == 1.0, "nothing there was nothing to lose"


# ---- the two updates


def updated(log_prob=LOG_PROB, outputs=None, **settings):
    """Return Lopti's calls of the actor, (stage, whether the learning rate stays), and the metrics that it makes."""
    asked = []

    def update(stage, keeps_lr):
        asked.append((stage.name, keeps_lr))
        return outputs[stage.name] if outputs else {}

    config = LoptiConfig(enable=True, **settings)
    return asked, update_in_stages(config, torch.tensor(log_prob), torch.tensor(MASK), update)


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
    for metrics in outputs.values():
        metrics["gradloc/spikes"] = [1]
        metrics |= {"gradloc/skip_step/skipped": [1, 0], "actor/pg_clipfrac": [0.5, 0.25]}
    _, metrics = updated(outputs=outputs)
    assert (metrics["actor/pg_loss"], metrics["actor/kl_loss"]) == ([11.0, 22.0], [[5.0], [10.0]])
    assert (metrics["actor/grad_norm"], metrics["other"]) == ([3.0, 5.0], [1])
    assert (metrics["gradloc/spikes"], metrics["gradloc/skip_step/skipped"]) == ([2], [2, 0])
    assert metrics["actor/pg_clipfrac"] == [1.0, 0.5]
    assert (metrics["lopti/low/pg_loss"], metrics["lopti/high/grad_norm"]) == ([1.0, 2.0], [5.0])
    assert "lopti/low/other" not in metrics
    shares = [metrics[f"lopti/{stage}/share"] for stage in ("low", "high")]
    assert shares == [[pytest.approx(4 / 9)], [pytest.approx(5 / 9)]]


WRONG = [
    ("algorithm.advantage_reweighting.alpha=1.5", "alpha must be a number from 0 (off) to 1, found 1.5"),
    ("algorithm.lopti.eta=0", "lopti.quantile must be set while algorithm.lopti.eta is 0"),
]


def test_wrong_settings_are_refused_by_name_and_right_ones_are_taken(single):
    right = [[], ["algorithm.advantage_reweighting.alpha=0.3"], ["algorithm.lopti.enable=true"]]
    engine = ["algorithm.lopti.enable=true", "trainer.use_legacy_worker_impl=disable"]
    size = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    cases = [[size, *case] for case in ([[override] for override, _ in WRONG] + right + [engine])]
    answers = single.run("configs.read_all", cases=cases, read="tests.world.configs.reweighting")[0]
    for (override, expected), answer in zip(WRONG, answers, strict=False):
        assert expected in answer["error"], override
    assert answers[len(WRONG) : -1] == ["nothing is on", "on", "on"]
    said = "trainer.use_legacy_worker_impl must be auto or enable while algorithm.lopti.enable is on"
    assert said in answers[-1]["error"]
