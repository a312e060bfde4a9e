# SPDX-License-Identifier: Apache-2.0
"""A loss's noise, of whatever shape, is no finding; what leaves that noise is found where it begins."""

import math
import random

import pytest

from gradloc.report.logs.recording import Metrics
from gradloc.report.logs.segments import LoggedRun, Segment
from gradloc.report.runs.diagnosis import diagnose


def said(losses, name="loss", known="actor/pg_loss", **others):
    """Return the kind and the headline of a run with such losses, one a step."""
    series = {name: losses, known: losses, **others}
    metrics = Metrics("log.csv", list(range(1, len(losses) + 1)), series, {known: name})
    found = diagnose(LoggedRun("log.csv", "CSV", name="log.csv", segments=[Segment(metrics)]))
    return found.kind, found.headline, found.limits


def noisy(sigma, num=400, seed=0):
    draw = random.Random(seed)
    return [(2 + 4 / at**0.5) * math.exp(draw.gauss(0, sigma)) for at in range(1, num + 1)]


def two_levels(seed):
    draw = random.Random(seed)
    return [loss * draw.choice([1, 1, 1, 8]) for loss in noisy(0.2, seed=seed)]


def sawtooth(seed):
    return [loss * 1.5 ** (at % 50 / 50) for at, loss in enumerate(noisy(0.03, seed=seed))]


SOUND = {f"noise {sigma}": lambda seed, sigma=sigma: noisy(sigma, seed=seed) for sigma in (0.02, 0.2, 1.0, 2.0)}
SOUND |= {"two levels": two_levels, "sawtooth": sawtooth, "digits": lambda seed: [round(x, 1) for x in noisy(0.1)]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_noise_is_no_finding(make, seed):
    assert said(make(seed))[0] == ""


@pytest.mark.parametrize("times", [1.5, 3.0, 100.0])
@pytest.mark.parametrize("at", [60, 200, 380])
def test_a_loss_that_stays_high_is_found_where_it_rose(at, times):
    losses = [loss * (times if step > at else 1) for step, loss in enumerate(noisy(0.05), 1)]
    kind, headline, _ = said(losses)
    assert (kind, f"rose at step {at + 1} and did not come back" in headline) == ("fell", True)


def test_a_rise_over_some_rows_begins_at_the_first_of_them():
    losses = [loss * 10 ** min(max(at - 199, 0) / 4, 1) for at, loss in enumerate(noisy(0.02))]
    assert "rose at step 201 and did not come back" in said(losses)[1]


@pytest.mark.parametrize("seed", range(20))
def test_a_short_log_has_no_jump_in_its_noise(seed):
    assert said(noisy(0.3, num=40, seed=seed))[0] == ""


def test_one_high_loss_is_a_jump_and_many_alike_are_not():
    once, often = noisy(0.05), noisy(0.05)
    once[200] *= 3
    often[20::20] = [loss * 3 for loss in often[20::20]]
    assert said(once)[0] == "loss" and "at step 201" in said(once)[1] and "was back at step 202" in said(once)[1]
    kind, headline, _ = said(often)
    assert kind == "" and "its largest jump, to" in headline


def test_a_mean_that_begins_anew_at_an_epoch_has_not_jumped():
    losses, epochs = noisy(0.02), [float(at // 100) for at in range(400)]
    losses[100] *= 2
    assert said(losses)[0] == "loss"
    assert said(losses, epoch=epochs)[0] == ""


def test_a_loss_that_climbs_and_falls_again_is_not_said_to_be_level():
    losses = [loss * 1.8 ** max(math.sin(at / 50), 0) for at, loss in enumerate(noisy(0.05, num=280))]
    assert "it rose from" in said(losses)[1] and "twice those" not in said(losses)[1]


def test_a_reward_that_falls_to_half_is_found_and_one_that_scatters_is_not():
    reward = [0.6 + 0.1 * math.sin(at) for at in range(200)]
    assert said(reward, "reward", "critic/score/mean")[0] == ""
    fallen = [value * (0.3 if at >= 120 else 1) for at, value in enumerate(reward)]
    kind, headline, _ = said(fallen, "reward", "critic/score/mean")
    assert kind == "fell" and "reward fell at step 121 and did not come back" in headline


def test_a_slow_fall_begins_where_the_reward_leaves_its_level_and_not_at_its_best():
    draw = random.Random(0)
    reward = [0.6 + draw.gauss(0, 0.01) for _ in range(48)] + [0.6 - 0.06 * at for at in range(1, 10)] + [0.02] * 10
    reward[8:11] = [0.64] * 3
    kind, headline, _ = said(reward, "reward", "critic/score/mean")
    begin = int(headline.partition(" around step ")[2].partition(" ")[0])
    assert kind == "fell" and 44 <= begin <= 49 and "from 0.6 around" in headline


def test_the_size_of_a_gans_loss_is_not_judged():
    rising = [0.7 * 1.01**at for at in range(300)]
    assert said(rising)[0] == "fell"
    kind, _, limits = said(rising, "G_loss")
    assert kind == "" and any("is a GAN's" in limit for limit in limits)
