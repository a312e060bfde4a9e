# SPDX-License-Identifier: Apache-2.0
"""The trainers as a user has them: off, attached, resumed, logged, judged; and the weights of an event."""

import json
import time
from unittest import mock

import pytest
import torch
import transformers
import trl

from gradloc.adapters.trl.step import OTHER_KEY
from gradloc.adapters.trl.watch import other_advantages
from gradloc.trl import GRPOTrainer, attach
from tests.adapters.trl import harness
from tests.adapters.trl.conftest import SAME
from tests.world.events import events_in

TOKEN = {"what": "token", "factor": 1e3}


def test_off_is_trls_own_trainer(run, tmp_path):
    stock = run("stock", plant=TOKEN)
    off = run("watched", plant=TOKEN, gradloc={"enable": False})
    assert [off[key] for key in SAME] == [stock[key] for key in SAME]
    assert not (tmp_path / "watched" / "gradloc").exists()
    assert not any(name.startswith("gradloc/") for log in off["logs"] for name in log)


def test_attached_to_a_trainer_it_is_the_same(run, tmp_path):
    def prepare(trainer):
        attach(trainer, {**harness.TAU, "action": {"mode": "mask"}})
        assert isinstance(trainer, harness.WatchedRewards) and isinstance(trainer, trl.GRPOTrainer)

    attached = run("stock", plant=TOKEN, prepare=prepare)
    without = run("without", plant=TOKEN)
    assert [attached[key] for key in SAME] == [without[key] for key in SAME]
    assert [event["action"]["taken"] for event in events_in(tmp_path / "stock")] == ["mask"]


def test_the_config_may_say_it(tmp_path):
    from gradloc.trl import GRPOConfig

    made = harness.save_model(str(tmp_path / "model"))
    args = GRPOConfig(str(tmp_path / "out"), gradloc="skip", report_to="none", use_cpu=True, bf16=False)
    data = harness.Dataset.from_dict({"prompt": harness.PROMPTS})
    of_config = GRPOTrainer(made, harness.vowels, args=args, train_dataset=data)
    assert of_config._watch.settings.action.mode == "skip"
    assert GRPOTrainer(made, harness.vowels, args=args, train_dataset=data, gradloc="off")._watch is None


def test_rows_hold_what_their_advantages_would_be_under_the_other_scaling(run):
    made = {}
    for scaling in ("group", "none"):

        def prepare(trainer, scaling=scaling):
            score = trainer._generate_and_score_completions

            def scored(inputs):
                return made.setdefault(scaling, score(inputs))

            trainer._generate_and_score_completions = scored

        run("watched", gradloc=harness.TAU, prepare=prepare, scale_rewards=scaling, reward_weights=[2.0])
    group, none = made["group"], made["none"]
    assert group["completion_ids"].equal(none["completion_ids"]) and none["advantages"].any()
    for one, other in ((group, none), (none, group)):
        assert (one[OTHER_KEY].unsqueeze(1) == other["advantages"]).all()


def test_a_row_that_nobody_could_score_has_no_advantage_either_way():
    rewards = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    assert other_advantages(rewards, 2, is_divided=True).tolist() == [0.0, 0.0, -1.0, 1.0]
    assert other_advantages(rewards, 2, is_divided=False).isfinite().all()


def test_counts_are_summed_over_the_steps_of_a_log_and_means_are_not(run):
    found = run("watched", plant=TOKEN, logging_steps=4, num_iterations=2)
    (log,) = [log for log in found["logs"] if "gradloc/spikes" in log]
    assert log["gradloc/spikes"] == log["gradloc/events"] == 2 and log["gradloc/failures"] == 0
    assert log["gradloc/norm_over_threshold"] > 10 and log["actor/grad_norm_max"] == pytest.approx(
        max(found["largest"])
    )


def test_tensorboard_gets_the_metrics_and_the_verdict(run, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    run("watched", plant=TOKEN, report_to="tensorboard")
    (folder,) = {path.parent for path in tmp_path.rglob("*tfevents*")}
    read = accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    read.Reload()
    assert "train/gradloc/spikes" in read.Tags()["scalars"]
    (text,) = [read.Tensors(tag)[0] for tag in read.Tags()["tensors"] if "gradloc/verdict" in tag]
    assert text.step == 3 and b"One token made the step" in text.tensor_proto.string_val[0]


def test_wandb_is_told_without_a_step_which_trls_own_logs_run_ahead_of():
    from gradloc.adapters.trl.watch import _OfWandb

    client = mock.Mock(run="a run")
    _OfWandb(client).log({"gradloc/verdict": "a"}, step=7)
    client.log.assert_called_once_with({"gradloc/verdict": "a", "train/global_step": 7})
    assert _OfWandb(client).run == "a run"


def test_a_resumed_run_goes_on_with_what_it_had_learned(run, tmp_path):
    learns = {"trigger": {"tau": None, "warmup": 4, "window": 8}}
    found = {}

    def keep(trainer):
        save = trainer._watch.save
        trainer._watch.save = lambda folder: (save(folder), found.update(driver=trainer._watch.driver))

    health = {"warmup": 2}
    run("watched", gradloc=learns, health=health, max_steps=6, save_strategy="steps", save_steps=6, prepare=keep)
    state = json.loads((tmp_path / "watched" / "checkpoint-6" / "gradloc.json").read_text())
    assert {"spikes", "health"} <= state.keys()
    resumed = harness.make("watched", str(tmp_path / "watched"), gradloc=learns, health=health, max_steps=7)
    assert resumed._watch.driver.adaptive.threshold(0) is None
    seen = []
    look = resumed._watch.localizer.before_step
    resumed._watch.localizer.before_step = lambda norm, policy: (seen.append(policy.thresholds), look(norm, policy))[1]
    resumed.train(resume_from_checkpoint=str(tmp_path / "watched" / "checkpoint-6"))
    assert len(seen) == 1 and seen[0][0] > 0
    assert resumed._watch.driver.writer.last_checkpoint.endswith("checkpoint-6")


def test_health_is_judged_at_every_step_by_trls_own_metrics(run, capsys):
    found = run("watched", plant=TOKEN, health={"warmup": 2, "gradient_jump": [5, 50]}, gradloc={"enable": True})
    states = [log["health/state"] for log in found["logs"] if "health/state" in log]
    assert states == [0, 0, 2, 2] or states == [0, 0, 2, 0]
    assert "health: step 3: danger (was healthy). gradient_jump: " in capsys.readouterr().out
    alone = run("watched", "alone", plant=TOKEN, health=True, gradloc={"enable": False})
    assert all("health/state" in log for log in alone["logs"][:-1]) and "gradloc/spikes" not in alone["logs"][0]


def test_the_weights_before_the_step_can_be_kept_and_ranks_meet_while_they_are_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("gradloc.core.ranks._LOOK_EVERY_S", 0.01)
    met = []

    def prepare(trainer):
        save, ranks = trainer._save, trainer._watch.ranks
        every = ranks.all
        trainer._save = lambda *given, **named: (time.sleep(0.2), save(*given, **named))
        ranks.all = lambda flag: (met.append(flag), every(flag))[1]

    run("watched", plant=TOKEN, gradloc={"evidence": {"checkpoint": "before_step"}}, prepare=prepare)
    assert met.count(False) > 3, "or a time-out would end the ranks that wait"
    stopped = run("stock", plant={}, max_steps=4, folder="two", prepare=harness.stop_after(2))
    (folder,) = (tmp_path / "watched" / "gradloc" / "weights").glob("global_step_3/actor")
    kept = transformers.AutoModelForCausalLM.from_pretrained(str(folder)).state_dict()
    assert harness.digest(kept) == stopped["weights"]
    (bundle,) = (tmp_path / "watched" / "gradloc").rglob("meta.json")
    assert json.loads(bundle.read_text())["checkpoint"] == str(folder)
