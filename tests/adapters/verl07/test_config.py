# SPDX-License-Identifier: Apache-2.0
"""Every option exists, is documented, has one default, and refuses a wrong value by its name."""

from pathlib import Path

import pytest

from gradloc.names import OURS, refuse_unknown_overrides

ROOT = Path(__file__).resolve().parents[3]
ACTOR = "actor_rollout_ref.actor"


def test_the_yaml_and_the_dataclasses_say_the_same(compose):
    (answer,) = compose([])
    answer["yaml"]["dump_dir"] = str(Path(answer["yaml"]["dump_dir"]).absolute())
    assert answer["yaml"] == answer["ok"]
    assert answer["spike"] is False


def flatten(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
ON = {
    f"{ACTOR}.spike_detection": "true",
    f"{ACTOR}.gradloc.enable": "true",
    f"{ACTOR}.gradloc.critic": "observe algorithm.adv_estimator=gae critic.strategy=fsdp2",
    f"{ACTOR}.gradloc.stabilize.token_clip.mode": f"mask {LOG_PROBS}",
    f"{ACTOR}.gradloc.stabilize.seq_clip.mode": f"clamp {LOG_PROBS}",
    f"{ACTOR}.gradloc.stabilize.layer_clip.rule": "zscore",
    f"{ACTOR}.gradloc.stabilize.skip_step.enable": "true",
    "algorithm.advantage_reweighting.alpha": "0.3",
    "algorithm.lopti.enable": "true",
    "trainer.health.enable": "true",
    "trainer.gradient_analysis_mode": "true",
    "trainer.quartile_analysis_mode": "true",
    "actor_rollout_ref.rollout.rollout_filter_value": "0.5",
    "actor_rollout_ref.rollout.rollout_filter_include_zero": "false",
}
"""Each switch of the package's, and what it takes to be on."""
OFF = ["", "+gradloc=off", f"{ACTOR}.gradloc.trigger.force_step=3", "actor_rollout_ref.rollout.rollout_filter_value=1"]
OFF += ["algorithm.advantage_reweighting.alpha=0", "algorithm.lopti.enable=false"]


def test_the_seam_that_imports_the_package_knows_every_switch_of_its(single):
    cases = [f"{key}={value}" for key, value in ON.items()]
    cases += [f"+gradloc={preset}" for preset in ("on", "observe", "mask", "skip", "safe")]
    read = "tests.world.configs.found_on"
    found = single.run("configs.read_all", cases=[case.split() for case in [*cases, *OFF]], read=read)[0]
    assert [answer for answer in found if not isinstance(answer, list | tuple)] == []
    assert [key for key, _ in found[: len(ON)]] == list(ON)
    assert all(key is not None for key, _ in found[: len(cases)])
    assert [is_on for _, is_on in found] == [True] * len(cases) + [False] * len(OFF)
    assert [key for key, _ in found[len(cases) :]] == [None] * len(OFF)


STABILIZE = "gradloc.stabilize"
WRONG = {
    "grad_norm_threshold=-1": "must be null (adaptive) or a positive",
    "bisect_budget_steps=0": "must be an integer of at least 1",
    "bisect_dump_dir=''": "must be the path of a folder",
    "spike_detection=7": "must be true or false",
    "gradloc.trigger.warmup=999": "must be at most",
    "gradloc.search.max_culprits=0": "must be an integer",
    "gradloc.action.mode=panic": "must be one of observe, mask",
    "gradloc.evidence.bundle=all": "must be one of culprits",
    "gradloc.budget=0": "must be an integer of at least 1",
    "gradloc.notify.webhook=somewhere": "must be null, env:NAME",
    f"{STABILIZE}.token_clip.mode=truncate": "must be one of off, mask, clamp, found 'trunc",
    f"{STABILIZE}.token_clip.mode=mask {STABILIZE}.token_clip.upper=null": "must be a number while token_clip.mode",
    f"{STABILIZE}.seq_clip.lower=0": "must be null (no bound) or in (0, 1]",
    f"{STABILIZE}.layer_clip.warmup=1": "must be an integer of at least 2, found 1",
    f"{STABILIZE}.skip_step.enable=maybe": "must be true or false, found 'maybe'",
}
"""Overrides -> what is said of the last of them; each block once: repo_checks/test_settings.py tries every bound."""


def test_a_wrong_value_is_refused_with_a_sentence_that_names_the_key(compose):
    answers = compose(*([f"{ACTOR}.{override}" for override in overrides.split()] for overrides in WRONG))
    for (overrides, sentence), answer in zip(WRONG.items(), answers, strict=True):
        key = overrides.split()[-1].partition("=")[0]
        assert f"{ACTOR}.{key} {sentence}" in answer.get("error", ""), overrides


def test_the_published_knobs_work_word_for_word(compose):
    values = ("True", "640.0", "64", "/tmp/bisect_dump")
    published = ("spike_detection", "grad_norm_threshold", "bisect_budget_steps", "bisect_dump_dir")
    ours = [f"gradloc.{name}" for name in ("enable", "trigger.tau", "budget", "dump_dir")]
    published, ours = (
        [f"{ACTOR}.{name}={value}" for name, value in zip(names, values, strict=True)] for names in (published, ours)
    )
    for answer in compose(published, ours, published + ours):
        found = answer["ok"]
        assert answer["spike"] is True and found["dump_dir"] == "/tmp/bisect_dump"
        assert (found["enable"], found["trigger"]["tau"], found["budget"]) == (True, 640.0, 64)


DIFFERENT = {
    "spike_detection=True": "gradloc.enable=False",
    "spike_detection=False": "gradloc.enable=True",
    "grad_norm_threshold=640": "gradloc.trigger.tau=100",
    "bisect_budget_steps=128": "gradloc.budget=64",
    "bisect_dump_dir=/tmp/a": "gradloc.dump_dir=/tmp/b",
}


@pytest.fixture
def settings(single):
    """``settings(*cases)``: gradloc's as the trainer sees them, or the error, for each list of overrides."""
    read = "tests.world.configs.settings"
    return lambda *cases: single.run("configs.read_all", cases=list(cases), read=read)[0]


def test_two_names_of_one_setting_that_differ_are_refused(settings):
    answers = settings(*([f"{ACTOR}.{name}" for name in pair] for pair in DIFFERENT.items()))
    for (published, ours), answer in zip(DIFFERENT.items(), answers, strict=True):
        name = f"{ACTOR}.{published.partition('=')[0]}"
        assert f"{name} must be left out or the same as its other name" in answer["error"] and ours in answer["error"]


def test_the_folder_for_events_is_absolute_since_workers_may_stand_elsewhere(settings):
    (answer,) = settings([f"{ACTOR}.gradloc.dump_dir=events"])
    assert answer["dump_dir"] == str(Path("events").absolute())


def test_a_name_at_its_default_counts_as_not_given(compose):
    cases = [
        [f"{ACTOR}.bisect_budget_steps=64", f"{ACTOR}.gradloc.budget=128"],
        [f"{ACTOR}.grad_norm_threshold=640", f"{ACTOR}.gradloc.trigger.tau=null"],
        [f"{ACTOR}.spike_detection=True", f"{ACTOR}.gradloc.enable=null"],
    ]
    first, second, third = (answer["ok"] for answer in compose(*cases))
    assert (first["budget"], second["trigger"]["tau"], third["enable"]) == (64, 640, True)


def test_enable_false_switches_off_all_that_is_under_gradloc(settings):
    answers = settings(["+gradloc=safe"], ["+gradloc=safe", f"{ACTOR}.gradloc.enable=false"])
    assert [(answer["enable"], answer["stabilizes"]) for answer in answers] == [(True, True), (False, False)]
    # the global clip is what bounds the step again
    assert [answer["clip_limit"] for answer in answers] == [None, 1.0]


def test_off_may_be_written_as_yaml_reads_it_and_then_nothing_is_refused(compose):
    off = [f"{ACTOR}.{STABILIZE}.{key}=off" for key in ("token_clip.mode", "seq_clip.mode", "layer_clip.rule")]
    (answer,) = compose([*off, f"{ACTOR}.{STABILIZE}.layer_clip.group=kind", f"{ACTOR}.strategy=fsdp"])
    assert answer["ok"]["stabilize"]["layer_clip"]["rule"] == "off"


def test_safe_is_a_cautious_start_and_overrides_go_over_it(compose):
    safe, changed = compose(["+gradloc=safe"], ["+gradloc=safe", f"{ACTOR}.{STABILIZE}.layer_clip.rule=adagc"])
    stabilize = safe["ok"]["stabilize"]
    assert safe["spike"] is True and safe["ok"]["action"]["mode"] == "observe"
    assert (stabilize["token_clip"]["mode"], stabilize["layer_clip"]["rule"]) == ("clamp", "zscore")
    assert (stabilize["seq_clip"]["mode"], stabilize["skip_step"]["enable"]) == ("off", False)
    assert changed["ok"]["stabilize"]["layer_clip"]["rule"] == "adagc"


def test_the_published_switch_says_nothing_about_the_stabilizers(settings):
    (answer,) = settings([f"{ACTOR}.spike_detection=False", f"{ACTOR}.gradloc.stabilize.skip_step.enable=true"])
    assert not answer["enable"] and answer["stabilizes"]


MISTYPED = {
    f"+{ACTOR}.gradloc.trigger.windoww=64": f"unknown setting {ACTOR}.gradloc.trigger.windoww: "
    f"did you mean {ACTOR}.gradloc.trigger.window?",
    f"+{ACTOR}.gradloc.enabel=true": f"did you mean {ACTOR}.gradloc.enable?",
    f"+{ACTOR}.gradloc.notify.web_hook=env:A": f"did you mean {ACTOR}.gradloc.notify.webhook?",
    f"+{ACTOR}.gradloc.stabilize.layer_clip.rul=zscore": f"did you mean {ACTOR}.gradloc.stabilize.layer_clip.rule?",
    f"+{ACTOR}.spike_detecton=true": f"did you mean {ACTOR}.spike_detection?",
    "+trainer.heath.enable=true": "did you mean trainer.health?",
    "+trainer.health.spike=[1,2]": "did you mean trainer.health.spikes?",
    "+trainer.gradient_analysis_moed=true": "did you mean trainer.gradient_analysis_mode?",
    "+trainer.quartil_analysis_mode=true": "did you mean trainer.quartile_analysis_mode?",
    "+actor_rollout_ref.rollout.rollout_filter_valeu=1": "did you mean actor_rollout_ref.rollout.rollout_filter_value?",
}


@pytest.mark.parametrize("override", MISTYPED)
def test_a_mistyped_name_on_the_command_line_is_refused_before_hydra_sees_it(override):
    for given in (override, override.removeprefix("+")):
        with pytest.raises(SystemExit) as refusal:
            refuse_unknown_overrides(["--config-name", "x", given])
        assert MISTYPED[override] in str(refusal.value)
        assert str(refusal.value).count("\n") == 0


@pytest.mark.slow
def test_a_mistyped_name_in_a_yaml_is_refused_by_the_trainer(single):
    cases = [[override] for override in MISTYPED]
    (answers,) = single.run("configs.read_all", cases=cases, read="tests.world.configs.trainer_hook")
    for (override, sentence), answer in zip(MISTYPED.items(), answers, strict=True):
        assert sentence in answer["error"], override


def test_the_webhooks_url_is_refused_before_anything_writes_it_down():
    with pytest.raises(SystemExit) as refusal:
        refuse_unknown_overrides([f"{ACTOR}.gradloc.notify.webhook=https://hooks.example/T0/secret"])
    assert "env:NAME" in str(refusal.value) and "secret" not in str(refusal.value)


def test_every_name_of_verls_and_ours_passes(single):
    (answers,) = single.run("configs.read_all", cases=[[]], read="tests.world.configs.every_name")
    theirs = list(flatten(answers[0]))
    refuse_unknown_overrides([f"{name}={value}" for name, value in theirs])
    names = [name for name, _ in theirs]
    assert [ours for ours in OURS if not any(f"{name}.".startswith(f"{ours}.") for name in names)] == []


def test_what_is_not_supported_is_refused_while_detection_is_on(compose):
    (answer,) = compose([f"{ACTOR}.spike_detection=True", f"{ACTOR}.strategy=veomni"])
    assert f"strategy must be fsdp or fsdp2 while {ACTOR}.gradloc.enable is on" in answer["error"]
