# SPDX-License-Identifier: Apache-2.0
"""A real event, replayed: the same weights give the same culprits, and all else is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc.loop.fingerprint import differs
from gradloc.record.bundle import Fingerprint
from gradloc.record.reading import read
from gradloc.replay.__main__ import render
from tests.replay.conftest import ON, A, check_same, edit_meta, edit_tensors
from tests.world.models.vision import SIZE

ROOT = Path(__file__).resolve().parents[2]
FULL = f"{A}gradloc.evidence.bundle=full"
RUNS = {
    "micro-batches of two rows": (),
    "dynamic micro-batches": (f"{A}use_dynamic_bsz=True", f"{A}ppo_max_token_len_per_gpu=60"),
    "two mini-batches, sequence sums, KL and entropy": (
        f"{A}ppo_mini_batch_size=8",
        f"{A}loss_agg_mode=seq-mean-token-sum",
        f"{A}use_kl_loss=True",
        f"{A}entropy_coeff=0.01",
    ),
    "a loss that draws random numbers": (f"{A}policy_loss.loss_mode=clip_cov",),
    "factors on the token losses": (
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *(f"{A}gradloc.stabilize.token_clip.{key}" for key in ("mode=clamp", "upper=1.0", "lower=1.0")),
    ),
    "FSDP1": (f"{A}strategy=fsdp",),
}
SLOW = ("dynamic micro-batches", "a loss that draws random numbers", "factors on the token losses")


@pytest.mark.parametrize("run", [pytest.param(run, marks=[pytest.mark.slow] * (run in SLOW)) for run in RUNS])
def test_the_same_event_at_its_weights_gives_the_same_culprits_and_the_same_norm(event, models, replay, run):
    noise = 1.0 if "calculate_log_probs" in str(RUNS[run]) else None
    bundle = event(f"full, {run}", overrides=(FULL, *RUNS[run]), rollout_noise=noise)
    done = replay(bundle, models / "model")
    assert (done["code"], done["err"]) == (0, "")
    check_same(done["record"], bundle)
    for culprit in done["record"]["culprits"]:
        before, now = culprit["event"], culprit["replay"]
        assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
        assert now["share"] == pytest.approx(before["share"], abs=1e-4)


def test_the_culprits_micro_batches_alone_keep_their_weights_and_the_answer_says_so(bundle, models, replay):
    done = replay(bundle, models / "model")
    assert done["code"] == 0
    assert "2 micro-batches (a part of the step; only its gradient is replayed)" in done["out"]
    assert done["out"].endswith("The same culprits as in the event.\n")
    assert re.search(r"certificate  explained; norm [\d.]+ \(error up to [\d.e-]+\) without the culprits;", done["out"])
    (culprit,) = done["record"]["culprits"]
    assert (culprit["rank"], culprit["positions"]) == (0, [3])
    assert culprit["replay"]["grad_norm"] == pytest.approx(culprit["event"]["grad_norm"], rel=1e-5)
    as_json = replay(bundle, models / "model", "--json")
    assert json.loads(as_json["out"]) == as_json["record"]


@pytest.mark.parametrize("strategy", ["auto", "bisect", pytest.param("share", marks=pytest.mark.slow)])
def test_every_strategy_names_them(event, models, replay, strategy):
    bundle = event("full, micro-batches of two rows", overrides=(FULL,))
    done = replay(bundle, models / "model", "--strategy", strategy, "--budget", 200)
    assert done["code"] == 0, done
    assert f"search       {strategy}: " in done["out"]


ALONE = """
import sys

absent = dict.fromkeys(("verl", "trl", "ray", "tensordict", "accelerate", "peft", "datasets", "omegaconf", "psutil"))
sys.modules.update(absent)  # an import of one of them fails
from gradloc.replay.__main__ import main

code = main(sys.argv[1:])
assert {name: sys.modules[name] for name in absent} == absent
sys.exit(code)
"""


@pytest.mark.slow
def test_the_command_runs_where_no_trainer_is_installed(bundle, models, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(bundle), "--model", str(models / "model"), "--oracle"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "recall 100%, 0 false positives" in done.stdout
    assert done.stdout.endswith("The same culprits as in the event.\n")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_weights_may_come_from_a_checkpoint_of_verls_workers(bundle, world, replay, tmp_path, strategy):
    world.run("tests.replay.scenarios.save_checkpoint", folder=str(tmp_path), strategy=strategy)
    done = replay(bundle, tmp_path / "global_step_0")
    assert (done["code"], done["err"]) == (0, "")
    assert "The weights are those of the event, by their fingerprint." in done["out"]


def test_other_weights_are_named_by_the_fingerprint(bundle, models, replay, prints):
    edit_meta(bundle, lambda meta: meta.update(fingerprint=prints["plain"]))
    assert "are those of the event, by their fingerprint" in replay(bundle, models / "model")["out"]
    other = replay(bundle, models / "other")
    assert "The weights differ from those of the event in 16 of 25 parameters" in other["out"]
    edit_meta(bundle, lambda meta: meta["event"]["step"].update(mini_batch=1))
    assert "evidence.checkpoint=before_step saves them" in replay(bundle, models / "other")["out"]


def test_other_culprits_than_the_events_end_with_1(bundle, models, replay):
    edit_meta(bundle, lambda meta: meta["event"]["culprits"][0].update(positions=[0]))
    done = replay(bundle, models / "model")
    assert done["code"] == 1
    assert done["out"].endswith("NOT the same culprits as in the event.\n")
    before, now = done["record"]["culprits"]
    assert (before["positions"], before["replay"]) == ([0], None)
    assert (now["positions"], now["event"]) == ([3], None)


def test_the_oracle_agrees_and_counts_what_a_search_missed(bundle, models, replay):
    record = replay(bundle, models / "model", "--oracle")["record"]
    oracle, (culprit,) = record["oracle"], record["culprits"]
    assert (oracle["recall"], oracle["false_positives"], oracle["missed"]) == (1.0, [], [])
    record["certificate"].update(norm_after="NaN", error_bound="Infinity")  # as JSON spells them
    assert "explained; norm NaN without the culprits;" in render(record)
    top = oracle["top"][0]
    assert top["is_named"] and top["positions"] == [3]
    assert top["grad_norm"] == pytest.approx(culprit["replay"]["grad_norm"], rel=1e-6)

    def plant_another(tensors):
        tensors["log_prob_coefficients"][2, 1] = 0.8 * tensors["log_prob_coefficients"].abs().max()

    edit_tensors(bundle, plant_another)
    edit_meta(bundle, lambda m: m["actor"]["gradloc"]["search"].update(max_culprits=1))
    oracle = replay(bundle, models / "model", "--oracle")["record"]["oracle"]
    assert (oracle["num_culprits"], oracle["recall"]) == (2, 0.5)
    assert oracle["missed"] == [[1, 1, 0, 1]]


def test_a_gradient_that_was_not_finite_is_traced_again(event, models, replay):
    done = replay(event("nan", plants=[(10, 3, float("nan"))]), models / "model")
    assert done["code"] == 0, done
    assert done["record"]["norm"] == {"event": "NaN", "replay": "NaN"}
    assert done["record"]["verdict"] == "same"


def test_half_precision_computes_as_fsdp_does(event, models, replay):
    overrides = (f"{A}fsdp_config.dtype=bfloat16", FULL)
    done = replay(event("bf16", overrides=overrides), models / "model")
    assert done["code"] == 0, done
    assert done["record"]["norm"]["event"] == pytest.approx(done["record"]["norm"]["replay"], rel=1e-3)


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1", "fsdp1, original parameters"])
def test_sharding_does_not_change_a_fingerprint(prints, sharding):
    plain, sharded, other = (read(Fingerprint, prints[name]) for name in ("plain", sharding, "other"))
    assert differs(plain, sharded) is differs(sharded, plain) is None
    assert (sharded.parameters is None) == (sharding == "fsdp1")
    assert differs(sharded, other) is not None


@pytest.mark.slow
def test_an_event_with_pictures_is_replayed_with_them(world, single, replay, tmp_path):
    full = [*ON, *SIZE, f"{A}gradloc.evidence.bundle=full"]
    world.run("tests.world.models.vision.train", overrides=full, dump_dir=str(tmp_path / "events"), advantage=1e4)
    single.run("tests.world.models.vision.save_model", folder=str(tmp_path / "model"))
    (bundle,) = (tmp_path / "events" / "events").iterdir()
    done = replay(bundle, tmp_path / "model")
    assert (done["code"], done["err"]) == (0, ""), done["out"]
    check_same(done["record"], bundle)

    edit_meta(bundle, lambda meta: meta.update(multi_modal_note="the pictures take more than 1 MiB"))
    refused = replay(bundle, tmp_path / "model")
    assert refused["code"] == 2 and "cannot be replayed: the pictures take more than 1 MiB." in refused["err"]
