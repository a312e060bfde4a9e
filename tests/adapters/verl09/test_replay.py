# SPDX-License-Identifier: Apache-2.0
"""An event of verl 0.9, replayed on a plain model, at the weights saved before the step."""

import json
import shutil

import pytest

from tests.replay.conftest import check_same

from . import harness
from .test_localization import ACTOR, LAYOUTS, ON, PLANT

EVIDENCE = [f"{ACTOR}.gradloc.evidence.bundle=full", f"{ACTOR}.gradloc.evidence.checkpoint=before_step"]
OTHERS = [name for name in LAYOUTS if name not in ("packed", "LoRA")]


@pytest.mark.parametrize("layout", ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_same_event_at_its_weights_gives_the_same_culprits_and_the_same_norm(train, single, layout, tmp_path):
    train([*ON, *LAYOUTS[layout], *EVIDENCE, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], plants=(PLANT,))
    weights = tmp_path / "weights" / "global_step_2"
    for shard in tmp_path.with_name(f"{tmp_path.name}-rank1").glob("weights/global_step_2/actor/*_rank_1.pt"):
        shutil.copy(shard, weights / "actor")  # the harness has a folder for each rank
    bundle, *_ = sorted((tmp_path / "events").iterdir())
    slack = 0.02 if layout == "bf16" else 1e-5
    (culprit,) = replayed(single, bundle, weights, tmp_path, slack)["culprits"]
    assert culprit["replay"]["share"] == pytest.approx(culprit["event"]["share"], abs=max(slack, 1e-4))


CLIPS = [
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    *(f"{ACTOR}.gradloc.stabilize.token_clip.{key}" for key in ("mode=clamp", "upper=1.0", "lower=1.0")),
]
LOPTI = ["algorithm.lopti.enable=true", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1"]


DISTILLED = [*harness.DISTILLED, "distillation.distillation_loss.loss_mode=k2"]
OF_LOSS = {"clips on ratios": CLIPS, "a stage of Lopti's": LOPTI, "distillation": DISTILLED}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "distillation")) for name in OF_LOSS]
)
def test_a_replay_has_the_gradient_of_the_runs_loss(world, single, name, tmp_path):
    events, full = str(tmp_path / "events"), [f"{ACTOR}.spike_detection=True", f"{ACTOR}.gradloc.evidence.bundle=full"]
    given = [*full, f"{ACTOR}.grad_norm_threshold=640", *OF_LOSS[name]]
    world.run(
        "tests.replay.scenarios.make_event", plants=[(5, 3, -1e5)], overrides=given, dump_dir=events, rollout_noise=1.0
    )
    (bundle,) = (tmp_path / "events" / "events").iterdir()
    replayed(single, bundle, f"{events}-model", tmp_path)


def replayed(single, bundle, model, folder, slack=1e-5):
    """Replay an event, which is to be the same; return the measurements."""
    argv = [str(bundle), "--model", str(model), "-o", str(folder / "out.json")]
    (done,) = single.run("tests.replay.scenarios.run_replay", argv=argv, patches={})
    assert done["code"] == 0, done["out"] + done["err"]  # which shows how far transformers has loaded the model
    record = json.loads((folder / "out.json").read_text())
    check_same(record, bundle, slack)
    return record
