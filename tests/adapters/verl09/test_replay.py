# SPDX-License-Identifier: Apache-2.0
"""An event of verl 0.9, replayed on its engine without trainer and Ray, at the weights saved before the step."""

import json
import shutil

import pytest

from .test_localization import ACTOR, ON, PLANT
from .test_stock import LAYOUTS

EVIDENCE = [f"{ACTOR}.gradloc.evidence.bundle=full", f"{ACTOR}.gradloc.evidence.checkpoint=before_step"]
OTHERS = [name for name in LAYOUTS if name not in ("packed", "LoRA")]


@pytest.mark.parametrize("layout", ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_same_event_at_its_weights_gives_the_same_culprits_and_the_same_norm(train, engine_world, layout, tmp_path):
    train([*ON, *LAYOUTS[layout], *EVIDENCE, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], plants=(PLANT,))
    weights = tmp_path / "weights" / "global_step_2"
    for shard in tmp_path.with_name(f"{tmp_path.name}-rank1").glob("weights/global_step_2/actor/*_rank_1.pt"):
        shutil.copy(shard, weights / "actor")  # the harness has a folder for each rank
    bundle, *_ = sorted((tmp_path / "events").iterdir())
    out = tmp_path / "out.json"
    argv = [str(bundle), "--model", str(weights), "--json", str(out)]
    done, other = engine_world.run("tests.adapters.verl09.harness.replay", argv=argv)
    assert (done["code"], done["err"], other["code"]) == (0, "", 0)
    record, event = json.loads(out.read_text()), json.loads((bundle / "meta.json").read_text())["event"]
    assert (record["verdict"], record["weights"]["verdict"]) == ("same", "same")
    assert record["micro_batches"]["is_whole_step"] and record["num_processes"] == 2
    slack = 0.02 if layout == "bf16" else 1e-5
    assert record["norm"]["replay"] == pytest.approx(event["trigger"]["grad_norm"], rel=slack)
    assert record["certificate"]["verdict"] == "explained"
    (culprit,) = record["culprits"]
    assert culprit["replay"]["share"] == pytest.approx(culprit["event"]["share"], abs=max(slack, 1e-4))


@pytest.mark.slow
def test_a_bundle_with_pictures_is_refused_in_one_sentence(engine_world, tmp_path):
    events = str(tmp_path / "events")
    settings = [f"{ACTOR}.spike_detection=True", f"{ACTOR}.grad_norm_threshold=640"]
    engine_world.run("tests.world.models.vision.train", overrides=settings, dump_dir=events, advantage=1e4)
    (bundle,) = (tmp_path / "events" / "events").iterdir()
    argv = [str(bundle), "--model", f"{events}-model"]
    done, _ = engine_world.run("tests.adapters.verl09.harness.replay", argv=argv)
    (sentence,) = done["err"].strip().splitlines()
    assert done["code"] == 2 and sentence.endswith("with which an event of verl 0.9 cannot be replayed yet.")
