# SPDX-License-Identifier: Apache-2.0
"""A run's config before the run: what is said of it, and what is refused."""

import json
import re

import pytest
import yaml

from gradloc.forecast import MODELS
from gradloc.report.shell import overrides_in
from gradloc.search.limit import Limit
from tests.adapters.test_requirements import refusals

ACTOR = "actor_rollout_ref.actor"
ON = ["+gradloc=observe", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "trainer.default_local_dir=/runs/x"]
TRL = {"output_dir": "/runs/x", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}


@pytest.fixture
def verl(patched_tree, monkeypatch):
    """The patched verl, as it is found where it is installed; a test that imports it fails."""
    monkeypatch.syspath_prepend(str(patched_tree))
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def trl(tmp_path):
    """``trl(**settings)``: a file with TRL's arguments."""

    def write(**settings):
        path = tmp_path / "grpo.yaml"
        path.write_text(yaml.safe_dump(TRL | settings))
        return path

    return write


def lines(text):
    """What is said, by its name."""
    pairs = [re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines()[1:]]
    return {name: said.strip() for name, said in pairs}


@pytest.mark.full
def test_a_run_of_verl_is_told_on_a_page(verl, shown):
    out = shown("check", *ON, "trainer.nnodes=4", f"{ACTOR}.gradloc.action.mode=mask", "--model", "7B", columns=80)
    assert len(out.splitlines()) < 40 and max(map(len, out.splitlines())) <= 80
    told = lines(shown("check", *ON, "trainer.nnodes=4", "--model", "7B", "--seconds", "60", columns=1000))
    assert told["refused"] == "nothing" and told["on"] == f"{ACTOR}.gradloc.enable"
    assert told["model"].startswith("7B: 7.6B weights on 32 GPUs, one replica over 32; 2 micro-batches of 4,096 tokens")
    assert told["search 1"].endswith("everything stays on the device <- the first plan that fits")
    # an update of four optimizer steps, and one setting that is measured when time is up
    seconds = Limit(2, 4.0, 60 / 4).seconds * 5 / 4
    assert told["stall"].startswith(f"adds at most {seconds:.0f} s to an update of 4 optimizer steps: 1 search,")
    assert told["events"].startswith("/runs/x/gradloc on the driver: 100 events at most")


@pytest.mark.full
def test_what_a_run_has_written_gives_the_same_as_the_overrides_that_it_was_started_with(verl, shown, tmp_path):
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        OmegaConf.save(compose("ppo_trainer", ON), tmp_path / "config.yaml")
    written = shown("check", tmp_path / "config.yaml", "trainer.nnodes=2", "--model", "7B")
    assert lines(written) == lines(shown("check", *ON, "trainer.nnodes=2", "--model", "7B"))


REFUSED = dict(list(refusals("0.7", "all").items())[::6]) | {
    f"{ACTOR}.gradloc.triger.tau=1": "did you mean actor_rollout_ref.actor.gradloc.trigger",
    "+trainer.heath.enable=true": "did you mean trainer.health",
    f"{ACTOR}.gradloc.trigger.floor=0.5": "trigger.floor must be a number greater than 1, found 0.5",
}


@pytest.mark.full
@pytest.mark.parametrize("overrides", REFUSED)
def test_what_the_trainer_refuses_at_start_is_refused_in_the_same_words(verl, shown, overrides):
    if "gradloc.critic" in overrides:
        pytest.importorskip("verl.trainer.ppo.utils")
    told = lines(shown("check", *ON, *overrides.split(), "--model", "7B", code=1))
    assert list(told) == ["refused"] and re.search(REFUSED[overrides], told["refused"])


def test_a_run_of_trl_is_told_and_refused_as_its_trainer_would(trl, shown):
    told = lines(shown("check", trl(gradloc="mask"), "per_device_train_batch_size=2", "--gpus", "8", "--model", "0.5B"))
    assert told["model"].startswith("0.5B: 0.5B weights on 8 GPUs, one replica over 1; 8 micro-batches of 1,536 tokens")
    assert told["on a spike"].startswith("action mask") and told["events"].startswith("/runs/x/gradloc on the driver")
    assert list(lines(shown("check", trl(gradloc="off")))) == ["refused", "on"]
    unknown = lines(shown("check", trl(lerning_rate=1e-6), "num_generation=4"))["unknown"]
    assert unknown == "lerning_rate: did you mean learning_rate?; num_generation: did you mean num_generations?"
    for wrong, said in (
        ({"torch_compile": True}, "torch_compile must be false"),
        ({"deepspeed": "zero3.json"}, "accelerate's distributed type must be one process, DDP or FSDP2"),
        ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, "fsdp_version must be 2"),
        ({"gradloc": {"trigger": {"tua": 1}}}, "unknown setting gradloc.trigger.tua: did you mean gradloc.trigger.tau"),
    ):
        assert lines(shown("check", trl(**wrong), "--gpus", "2", code=1))["refused"].startswith(said)


def test_a_model_is_read_where_it_lies_or_said_not_to_be_known(trl, shown, tmp_path):
    model = MODELS["7B"]
    sizes = {"hidden_size": model.width, "intermediate_size": model.inner, "num_hidden_layers": model.layers}
    sizes |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": model.vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    read = lines(shown("check", trl(model_name_or_path=str(tmp_path))))
    named = lines(shown("check", trl(), "--model", "7B"))
    for name in ("training", "search 1", "search 4"):
        assert read[name] == named[name]
    assert lines(shown("check", trl(model_name_or_path="org/hub")))["memory"].startswith("not known: give --model")
    none = lines(shown("check", trl(), "--model", "72B", "--card", "40"))
    assert none["training"].endswith("does not fit") and none["search"].startswith("no plan fits")
    for wrong in ({"num_attention_heads": 0}, {"intermediate_size": None}):
        (tmp_path / "config.json").write_text(json.dumps(sizes | wrong))
        assert "memory" in lines(shown("check", trl(model_name_or_path=str(tmp_path))))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml does not exist: name the run's config"),
        (["OTHER"], "other.yaml has no setting of TRL's or verl's: name the run's config"),
        (["LIST"], "is no configuration in YAML or JSON"),
        (["ANCHORS"], "is no configuration in YAML or JSON"),
        (["LARGE"], "is no run's config: it is larger than 0.2 MB"),
        (["TRL", "--gpus", "0"], "--gpus must be a positive number, found 0."),
        (["TRL", "--card", "inf"], "--card must be a positive number, found inf."),
        (["TRL", "--seconds", "nan"], "--seconds must be a positive number, found nan."),
        (["TRL", "--model", "8Q"], "gradloc: give --model a model's folder, or one of 0.5B"),
        (["TRL", "gradient_accumulation_steps=0"], "gradient_accumulation_steps must be a positive integer, found 0)."),
        (["TRL", "per_device_train_batch_size=1x"], "(a size must be a whole number, found '1x')."),
        (["trainer.nnodes=2", "--gpus", "8"], "--gpus is for TRL's arguments"),
        (["TRL", "torch_compile"], "an override must be KEY=VALUE, found torch_compile"),
        (["TRL", "gradloc={"], "is no YAML"),
        (["TRL", "per_device_train_batch_size=abc"], "missing, 0 or no number"),
        (["TRL", "per_device_train_batch_size=null"], "missing, 0 or no number"),
    ],
)
def test_what_is_no_config_is_refused_with_a_sentence(trl, tmp_path, refused, words, said):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "other.yaml").write_text("step: 1\nloss: 2\n")
    anchors = "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 10))
    (tmp_path / "anchors.yaml").write_text(f"a0: &a0 [x]\n{anchors}actor_rollout_ref: *a9\n")
    (tmp_path / "large.yaml").write_text("a: 1\n" * 50_000)
    given = {name: str(tmp_path / f"{name.lower()}.yaml") for name in ("LIST", "OTHER", "ANCHORS", "LARGE")} | {
        "TRL": str(trl())
    }
    assert said in refused("check", *(given.get(word, word) for word in words))


def test_a_variable_of_a_script_that_doubles_the_one_before_stays_small(tmp_path):
    text = "A=xx\n" + "A=$A$A\n" * 60 + "python -m verl.trainer.main_ppo trainer.name=$A$A trainer.nnodes=2\n"
    (named, nodes) = overrides_in(text)
    assert len(named) <= 10_000 and nodes == "trainer.nnodes=2"


@pytest.mark.full
def test_a_preset_that_is_none_and_a_size_that_is_no_number_are_refused_in_our_words(verl, shown):
    assert "+gradloc=foo is no preset: there are heal, mask," in shown("check", "+gradloc=foo", code=1)
    said = shown("check", *ON, "trainer.nnodes=x", code=1)
    assert "a size must be a whole number, found 'x'." in said
    assert "must be at least 1, found 0 and 8." in shown("check", *ON, "trainer.nnodes=0", code=1)
    assert "unknown setting gradlok: did you mean +gradloc=on?" in shown("check", "+gradlok=on", code=1)


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["ppo_micro_batch_size_per_gpu=0", "ppo_mini_batch_size=0"])
def test_a_size_of_0_is_refused_with_a_sentence(verl, refused, wrong):
    refused("check", *ON, f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.{wrong}")


@pytest.mark.full
def test_a_config_of_another_ending_is_itself_read_and_not_one_beside_it(verl, tmp_path, shown):
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    wrong = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {strategy: zzz, spike_detection: true}}\n"
    (tmp_path / "run.yml").write_text(wrong)
    assert "zzz" in shown("check", tmp_path / "run.yml", code=1)


SCRIPT = """#!/usr/bin/env bash
MODEL=Qwen/Qwen2.5-7B-Instruct
export NODES=${NODES:-4}
python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/train.parquet data.max_prompt_length=1024 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    trainer.nnodes=$NODES \\
    +gradloc=observe $@
"""


def test_a_script_of_overrides_is_read_without_verl_and_the_stall_is_in_seconds(tmp_path, shown, refused, monkeypatch):
    pytest.importorskip("omegaconf")
    monkeypatch.setattr("gradloc.report.commands.check.find_spec", lambda name: None)
    (tmp_path / "run.sh").write_text(SCRIPT)
    said = lines(shown("check", tmp_path / "run.sh", columns=1000))
    assert said["on"] == f"{ACTOR}.gradloc.enable" and said["model"].startswith("7B: 7.6B weights on 32 GPUs")
    assert " s to an update" in said["stall"] and said["not checked"].startswith("what verl itself refuses, since")
    assert json.loads(shown("check", tmp_path / "run.sh", "--json"))["on"] == said["on"]
    shown("check", tmp_path / "run.sh", "+gradloc=obsrve", code=1)
    assert lines(shown("check", tmp_path / "run.sh", "+gradloc=off"))["on"].startswith("nothing")
    assert "must be KEY=VALUE, found other.yaml" in refused("check", tmp_path / "run.sh", "other.yaml")
    assert lines(shown("check", "trainer.nnodes=2", columns=1000))["on"].startswith("nothing")
    said = lines(shown("check", "+gradloc=mask", "--model", "7B", "--seconds", "9", columns=1000))
    assert said["on a spike"].startswith("action mask") and "ppo_micro_batch_size_per_gpu must be set" in said["memory"]
    assert "events" in said
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    assert "verl is not installed" in refused("check", tmp_path / "run.yaml")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho hello\n")
    assert "has no override of verl's" in refused("check", tmp_path / "run.sh")
