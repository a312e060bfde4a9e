# SPDX-License-Identifier: Apache-2.0
"""What is refused, with which sentence; and the cautious start."""

import pytest

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
ENGINE = "trainer.use_legacy_worker_impl=disable"

WRONG = [
    ("token_clip.mode=truncate", "token_clip.mode must be one of off, mask, clamp, found 'trunc"),
    (
        f"token_clip.mode=mask {STABILIZE}.token_clip.upper=null",
        "token_clip.upper must be a number while token_clip.mode",
    ),
    ("seq_clip.lower=0", "seq_clip.lower must be null (no bound) or in (0, 1]"),
    ("layer_clip.group=row", "layer_clip.group must be one of layer, kind, tensor, found 'row'"),
    ("layer_clip.warmup=1", "layer_clip.warmup must be an integer of at least 2, found 1"),
    ("skip_step.enable=maybe", "skip_step.enable must be true or false, found 'maybe'"),
]


def test_a_wrong_value_is_refused_with_a_sentence_that_names_the_key(compose):
    answers = compose(*(f"{STABILIZE}.{override}".split() for override, _ in WRONG))
    for (override, sentence), answer in zip(WRONG, answers, strict=True):
        assert f"{STABILIZE}.{sentence}" in answer.get("error", ""), override


@pytest.mark.parametrize("group", ["kind", "tensor"])
def test_fsdp1_without_original_parameters_has_nothing_finer_than_layers(compose, group):
    fine = [f"{ACTOR}.strategy=fsdp", *(f"{STABILIZE}.layer_clip.{key}" for key in ("rule=adagc", f"group={group}"))]
    refused, allowed, off = compose(fine, [*fine, f"{ACTOR}.fsdp_config.use_orig_params=true"], [fine[0], fine[2]])
    assert (
        f"{ACTOR}.fsdp_config.use_orig_params must be true with strategy=fsdp while {STABILIZE}.layer_clip.group finer"
        in refused["error"]
    )
    assert "ok" in allowed and "ok" in off


def test_what_is_not_supported_is_refused_while_a_stabilizer_is_on(compose):
    for on in ("token_clip.mode=mask", "seq_clip.mode=clamp", "layer_clip.rule=zscore", "skip_step.enable=true"):
        other, split = compose(
            [f"{STABILIZE}.{on}", f"{ACTOR}.strategy=veomni"],
            [f"{STABILIZE}.{on}", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        )
        assert f"strategy must be fsdp or fsdp2 while {STABILIZE} is on" in other["error"], on
        assert "ulysses_sequence_parallel_size must be 1" in split["error"], on


def test_off_may_be_written_as_yaml_reads_it(compose):
    (answer,) = compose([f"{STABILIZE}.{key}=off" for key in ("token_clip.mode", "seq_clip.mode", "layer_clip.rule")])
    assert answer["ok"]["stabilize"]["layer_clip"]["rule"] == "off"


def test_the_whole_config_is_checked_for_what_a_stabilizer_needs(single, dump_dir):
    cases = [
        ([], False),
        ([ENGINE], False),
        ([f"{STABILIZE}.layer_clip.rule=adagc"], True),
        ([f"{STABILIZE}.skip_step.enable=true"], True),
        ([f"{STABILIZE}.token_clip.mode=mask", LOG_PROBS], True),
        ([f"{STABILIZE}.token_clip.mode=mask"], "actor_rollout_ref.rollout.calculate_log_probs must be true"),
        ([f"{STABILIZE}.seq_clip.mode=clamp"], "actor_rollout_ref.rollout.calculate_log_probs must be true"),
        ([f"{STABILIZE}.skip_step.enable=true", ENGINE], "trainer.use_legacy_worker_impl must be auto or enable"),
    ]
    given = dict(cases=[overrides for overrides, _ in cases], dump_dir=dump_dir)
    (answers,) = single.run("tests.stabilize.scenarios.check_configs", **given)
    for (overrides, expected), answer in zip(cases, answers, strict=True):
        if isinstance(expected, bool):
            assert answer is expected, overrides
        else:
            assert expected in answer, overrides


def test_safe_is_a_cautious_start_and_overrides_go_over_it(compose, single, dump_dir):
    safe, changed = compose(["+gradloc=safe"], ["+gradloc=safe", f"{STABILIZE}.layer_clip.rule=adagc"])
    assert safe["spike"] is True
    assert safe["ok"]["action"]["mode"] == "observe"
    stabilize = safe["ok"]["stabilize"]
    assert stabilize["token_clip"] == {"mode": "clamp", "upper": 5.0, "lower": None}
    assert stabilize["layer_clip"]["rule"] == "zscore"
    assert stabilize["seq_clip"]["mode"] == "off"
    assert stabilize["skip_step"]["enable"] is False
    assert changed["ok"]["stabilize"]["layer_clip"]["rule"] == "adagc"
    answers = single.run("tests.stabilize.scenarios.check_configs", cases=[["+gradloc=safe"]], dump_dir=dump_dir)
    assert answers == [[True]]
