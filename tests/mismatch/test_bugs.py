# SPDX-License-Identifier: Apache-2.0
"""Bugs of public threads, made anew: the fault is put back into a small model's engine or trainer, and is named."""

import re

import numpy as np
import pytest

from gradloc.mismatch import KINDS, columns, judge
from gradloc.report.commands.mismatch import every_number, evidence

from .model import ROWS, TOKENS, VOCABULARY, Rollout, Sampler, Weights, generate, moved, score, weights

MODEL, RANDOM = weights(), np.random.default_rng(5)
ADAPTER = RANDOM.standard_normal((48, 4)) @ RANDOM.standard_normal((4, 48)) * 0.03


def scored(made: Rollout, model: Weights = MODEL, temperature: float = 1.0) -> np.ndarray:
    return score(model, made.prompts, made.ids, temperature)


def named(made: Rollout, trainer: np.ndarray, mask=None) -> str:
    return judge(columns(made.told, trainer, mask, ids=made.ids, group=made.group)).name


@pytest.mark.parametrize("seed", range(6))
def test_two_kernels_of_one_model_are_noise(seed):
    made = generate(weights(seed), seed)
    assert named(made, scored(made, weights(seed))) == "noise"


@pytest.mark.parametrize(
    ("engine", "trainer", "kind"),
    [
        (MODEL, moved(MODEL, 0.02), "stale"),
        (moved(MODEL, 0.25, names=("embed",)), moved(MODEL, 0.25), "other_weights"),
        (MODEL, {**MODEL, "mix": MODEL["mix"] + ADAPTER}, "other_weights"),
    ],
    ids=["the engine's are old", "an update that reached one matrix of three", "a base that is served for its adapter"],
)
def test_two_sets_of_weights_are_a_stale_policy_or_others(engine, trainer, kind):
    made = generate(engine)
    assert named(made, scored(made, trainer)) == kind


@pytest.mark.parametrize("lag", [-1, 1])
def test_log_probs_off_by_one_after_a_tools_turn_are_a_shift(lag):
    made = generate(MODEL)
    begins = np.random.default_rng(2).integers(10, 30, ROWS)
    mask = np.arange(TOKENS) != begins[:, None]  # the tool's own
    moved_on = np.where(np.arange(TOKENS) > begins[:, None], np.roll(made.told, lag, 1), made.told)
    mask[:, [0, -1]] = False
    trainer = scored(made)
    verdict = judge(columns(moved_on, trainer, mask, ids=made.ids))
    assert verdict.name == "shift"
    assert verdict.evidence["shift"]["lag"] == lag
    assert 0.4 < verdict.evidence["shift"]["token_share"] < 0.9


def test_text_that_was_tokenized_anew_is_named():
    made = generate(MODEL)
    random, ids = np.random.default_rng(3), []
    for row in made.ids:  # two or three pairs become one token each
        pairs = set(random.choice(range(5, TOKENS - 5, 2), random.integers(2, 4), replace=False).tolist())
        merged = {at: (row[at] + row[at + 1]) % VOCABULARY for at in pairs}
        ids.append([merged.get(at, row[at]) for at in range(TOKENS) if at - 1 not in pairs])
    width = min(map(len, ids))
    ids = np.array([row[:width] for row in ids])
    again = Rollout(made.prompts, ids, made.told[:, :width], made.group)
    assert named(again, scored(again)) == "never_sampled"


@pytest.mark.parametrize("filled", [0.0, np.nan, -1.0])
def test_a_tools_text_in_the_loss_is_never_sampled(filled):
    made = generate(MODEL)
    random = np.random.default_rng(4)
    tool = np.zeros((ROWS, TOKENS), bool)
    for row in range(0, ROWS, 2):
        begin = random.integers(8, 50)
        tool[row, begin : begin + 6] = True
    ids = np.where(tool, random.integers(VOCABULARY, size=tool.shape), made.ids)
    told = np.where(tool, filled, score(MODEL, made.prompts, ids, order=np.arange(48)[::-1]))
    mixed = Rollout(made.prompts, ids, told, made.group)
    assert named(mixed, scored(mixed)) == "never_sampled"


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.3])
@pytest.mark.parametrize("is_raw", [False, True])
def test_a_temperature_on_one_side_is_named(temperature, is_raw):
    made = generate(MODEL, sampler=Sampler(temperature, is_raw=is_raw))
    assert named(made, scored(made, temperature=temperature if is_raw else 1.0)) == "temperature"
    if not is_raw:
        assert named(made, scored(made, temperature=temperature)) == "noise", "the same on both sides"


@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_a_top_p_sampler_is_named_and_its_kept_mass_is_the_mean_ratio(top_p):
    sampler = Sampler(top_p=top_p)
    made = generate(MODEL, sampler=sampler)
    verdict = judge(columns(made.told, scored(made), ids=made.ids))
    assert verdict.name == "truncated"
    assert verdict.ratio == pytest.approx(np.mean(sampler.masses), rel=0.01), "as in the tables of TRL #6789 and #7269"


def test_prompts_in_an_old_cache_are_named():
    made = generate(MODEL, cached=moved(MODEL, 0.6))
    verdict = judge(columns(made.told, scored(made), ids=made.ids, group=made.group))
    assert verdict.name == "few_rows"
    assert verdict.evidence["few_rows"]["early_over_late"] > 1.5


@pytest.mark.parametrize("layout", ["place_in_packs_of_4", "padding_in_batches_of_8"])
def test_rows_that_differ_as_they_are_laid_out_are_padding(layout):
    made, rows = generate(MODEL), np.arange(ROWS)
    prompt = np.random.default_rng(8).integers(5, 60, ROWS)
    by = {
        "place_in_packs_of_4": (rows % 4 > 0) * 0.3,
        "padding_in_batches_of_8": (prompt.reshape(-1, 8).max(1)[rows // 8] - prompt) / 100,
    }[layout]
    noise = np.random.default_rng(9).standard_normal(made.told.shape) * by[:, None]
    trainer = scored(made) + noise * -np.expm1(made.told)
    verdict = judge(columns(made.told, np.minimum(trainer, 0), ids=made.ids, group=made.group, prompt=prompt))
    assert verdict.name == "padding" and verdict.evidence["padding"][layout] > 0.85


@pytest.mark.parametrize("lag", [-1, 1])
def test_a_shift_beside_a_temperature_is_named_with_it(lag):
    made = generate(MODEL, sampler=Sampler(0.6))
    made.told[:] = np.roll(made.told, lag, 1)
    mask = np.ones(made.ids.shape, bool)
    mask[:, [0, -1]] = False
    assert set(named(made, scored(made), mask).split(" + ")) == {"shift", "temperature"}


def test_a_bound_of_the_engine_beside_a_temperature_is_a_tail():
    made = generate(MODEL, sampler=Sampler(1.3))
    made.told[:] = np.maximum(made.told, -7.0)
    assert (made.told == -7.0).mean() > 0.01
    assert set(named(made, scored(made)).split(" + ")) == {"temperature", "tail"}


def test_each_number_has_a_name_of_its_own_and_each_kind_its_evidence():
    healthy, cut, cached = generate(MODEL), generate(MODEL, sampler=Sampler(top_p=0.8)), moved(MODEL, 0.6)
    hot, noise = generate(MODEL, sampler=Sampler(0.6)), np.random.default_rng(7).standard_normal((ROWS, TOKENS))
    old, trainer, jumps = generate(MODEL, cached=cached), scored(healthy), np.abs(noise) > 2.5
    cases = {
        "noise": (healthy, trainer),
        "truncated": (cut, scored(cut)),
        "temperature": (hot, scored(hot)),
        "shift": (healthy, np.roll(trainer, 1, 1)),
        "never_sampled": (healthy, np.where(np.arange(TOKENS) // 6 == 3, trainer.min(), trainer)),
        "stale": (healthy, scored(healthy, moved(MODEL, 0.02))),
        "other_weights": (healthy, scored(healthy, moved(MODEL, 0.25))),
        "few_rows": (old, scored(old)),
        "padding": (healthy, np.minimum(trainer + noise * (np.arange(ROWS)[:, None] % 4 > 0) / 4, 0)),
        "routing": (healthy, trainer - 3.0 * jumps),
        "tail": (healthy, np.log(np.exp(trainer) + 1e-3)),
    }
    assert cases.keys() == KINDS.keys()
    for kind, (made, seen) in cases.items():
        verdict = judge(columns(made.told, seen, ids=made.ids, group=made.group))
        assert kind in verdict.kinds, (kind, verdict.name)
        labels = [label for label, _ in every_number(verdict, kind)]
        assert len({*labels}) == len(labels) and not [label for label in labels if "_" in label]
        said = evidence(verdict, kind)
        assert said.endswith(".") and 1 <= len(re.findall(r"\d+(?:\.\d+)?", said)) <= 7, said


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_likely_tokens_that_one_side_lowers_are_no_tail_of_unlikely_ones(side):
    made = generate(MODEL)
    columns_of = {"trainer": scored(made), "rollout": made.told.copy()}
    likely = made.told > -1.5
    healthy = judge(columns(**columns_of, mask=likely, ids=made.ids))
    columns_of[side][np.random.default_rng(6).random(likely.shape) < 0.03] -= 3.0
    verdict = judge(columns(**columns_of, mask=likely, ids=made.ids))
    assert "tail" not in verdict.evidence
    assert verdict.noise == pytest.approx(healthy.noise, rel=0.1), "of the tokens that agree"
    if side == "trainer":
        assert verdict.name == "routing" and verdict.evidence["routing"]["lower"] == 1
    else:
        assert verdict.name == "cannot tell" and "higher on the trainer's side, by 3 nats" in verdict.why_not


@pytest.mark.parametrize("least", [1e-3, 0.05])
def test_a_tail_ends_where_it_no_longer_shows_and_noise_is_of_what_is_left(least):
    made = generate(MODEL)
    verdict = judge(columns(made.told, np.log(np.exp(scored(made)) + least), ids=made.ids))
    assert verdict.name == "tail"
    assert verdict.evidence["tail"]["below"] < np.log(6 * least), "where it adds a fifth to a probability"
    assert np.isnan(verdict.noise) if least == 0.05 else 0 < verdict.noise < 0.02


def test_cut_sampling_by_other_weights_cannot_be_told():
    made = generate(MODEL, sampler=Sampler(top_p=0.9))
    trainer = scored(made, moved(MODEL, 0.1))
    verdict = judge(columns(made.told, trainer, ids=made.ids, group=made.group))
    assert verdict.name == "cannot tell" and "second cause" in verdict.why_not
