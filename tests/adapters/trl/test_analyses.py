# SPDX-License-Identifier: Apache-2.0
"""TRL's steps taken apart, and made in Lopti's two stages, against TRL's own run with the other tokens detached."""

import json

import pytest

from gradloc.adapters.trl.watch import _uid
from tests.adapters.trl.conftest import SAME
from tests.adapters.trl.harness import make
from tests.world.events import validate

EACH_STEP = {"buckets": {"num_buckets": 2, "every": 1}, "quartiles": {"every": 1, "num_tokens": 3}}


def letting(chosen):
    """Prepares a run so that nothing flows back through any but these tokens: (trainer, inputs) -> bool (B, T)."""

    def prepare(trainer):
        compute = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: compute(model, {**inputs, "planted": ~chosen(trainer, inputs)})

    return prepare


def are_of(uid):
    def chosen(trainer, inputs):
        pairs = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        mine = [_uid(ids[mask.bool()].cpu()) == uid for ids, mask in pairs]
        return inputs["completion_mask"].new_tensor(mine).bool().unsqueeze(1).expand_as(inputs["completion_mask"])

    return chosen


def record_in(tmp_path, kind):
    record = json.loads((tmp_path / "watched" / "gradloc" / f"{kind}_analysis" / "step_1.json").read_text())
    validate(f"{kind}_analysis", record)
    return record


def test_each_prompts_part_is_the_gradient_of_a_run_without_the_others(run, tmp_path):
    watched = run("watched", gradloc=EACH_STEP, max_steps=2)
    stock = run("stock", max_steps=2)
    assert [watched[key] for key in SAME] == [stock[key] for key in SAME], "an analysis leaves the run as it was"
    record = record_in(tmp_path, "gradient")
    assert record["loss"]["terms"] == ["task"] and not watched["error"]
    for group in record["groups"]:
        alone = run("without", group["uid"], max_steps=1, prepare=letting(are_of(group["uid"])))
        (bucket,) = (each for each in record["buckets"] if each["name"] == group["bucket"])
        assert bucket["norm"]["task"]["part"] == pytest.approx(alone["norms"][0], rel=1e-4)
    assert record["buckets"][-1]["norm"]["task"]["own"] == pytest.approx(stock["norms"][0], rel=1e-4)
    quartiles = record_in(tmp_path, "quartile")
    assert quartiles["whole"]["norm"] == pytest.approx(stock["norms"][0], rel=1e-4)
    assert sum(each["gradient_share"] for each in quartiles["quartiles"]) == pytest.approx(1.0, rel=1e-4)


def test_the_terms_of_the_loss_add_up_to_it(run, tmp_path):
    watched = run("watched", gradloc=EACH_STEP, max_steps=1, beta=0.05, num_iterations=1)
    record = record_in(tmp_path, "gradient")
    assert record["loss"]["terms"] == ["task", "kl"]
    whole = record["buckets"][-1]
    task, kl = (whole["norm"][term]["part"] for term in ("task", "kl"))
    product = 0.0 if whole["cosine"]["task_kl"] is None else 2 * task * kl * whole["cosine"]["task_kl"]
    assert (task**2 + kl**2 + product) ** 0.5 == pytest.approx(watched["norms"][0], rel=1e-4)


ETA = 0.023  # of a random model of 44 tokens: about half are less likely


@pytest.mark.parametrize("eta", [ETA, -ETA])
def test_loptis_stages_are_trls_two_passes_with_the_other_tokens_detached(run, eta):
    def in_stage(trainer, inputs):
        each = trainer.args.steps_per_generation
        is_low = inputs["old_per_token_logps"].exp() < abs(eta)
        return is_low if (trainer._step % (2 * each) < each) == (eta > 0) else ~is_low

    given = {"max_steps": 2, "num_iterations": 2, "beta": 0.05}
    watched = run("watched", gradloc={"lopti": {"eta": eta}}, **given)
    by_hand = run("without", prepare=letting(in_stage), **given)
    assert [watched[key] for key in SAME] == [by_hand[key] for key in SAME]
    assert watched["norms"] == by_hand["norms"] and all(norm > 0 for norm in watched["norms"])
    assert watched["weights"] != run("stock", **given)["weights"]


@pytest.mark.parametrize(
    "gradloc, config, sentence",
    [
        ({"lopti": True}, {}, "num_iterations must be 2 with gradloc's lopti, whose stages they are, found 1."),
        ({"lopti": {"quantile": 0.5}}, {"num_iterations": 2}, "gradloc's lopti must be true, or eta by name"),
        ({"lopti": True}, {"base": "RLOOTrainer"}, "the trainer with gradloc's lopti must be TRL's GRPOTrainer"),
        ({"buckets": {"every": 0}}, {}, "buckets.every must be an integer of at least 1, found 0."),
    ],
)
def test_what_cannot_be_is_refused_at_start(tmp_path, gradloc, config, sentence):
    with pytest.raises(ValueError) as refusal:
        make("watched", str(tmp_path / "watched"), gradloc=gradloc, **config)
    assert str(refusal.value).startswith(sentence)
