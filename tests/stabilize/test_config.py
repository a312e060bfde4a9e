# SPDX-License-Identifier: Apache-2.0
"""Sentences that refuse a setting, and the cautious start; tests/adapters/test_requirements.py has the rest."""

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"

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
    ("seq_clip.mode=clamp", "token_clip or seq_clip is on (its weights come from the rollout's log-probs)"),
]


def test_a_wrong_value_is_refused_with_a_sentence_that_names_the_key(compose):
    answers = compose(*(f"{STABILIZE}.{override}".split() for override, _ in WRONG))
    for (override, sentence), answer in zip(WRONG, answers, strict=True):
        assert f"{STABILIZE}.{sentence}" in answer.get("error", ""), override


def test_off_may_be_written_as_yaml_reads_it_and_then_nothing_is_refused(compose):
    off = [f"{STABILIZE}.{key}=off" for key in ("token_clip.mode", "seq_clip.mode", "layer_clip.rule")]
    (answer,) = compose([*off, f"{STABILIZE}.layer_clip.group=kind", f"{ACTOR}.strategy=fsdp"])
    assert answer["ok"]["stabilize"]["layer_clip"]["rule"] == "off"


def test_safe_is_a_cautious_start_and_overrides_go_over_it(compose):
    safe, changed = compose(["+gradloc=safe"], ["+gradloc=safe", f"{STABILIZE}.layer_clip.rule=adagc"])
    assert safe["spike"] is True
    assert safe["ok"]["action"]["mode"] == "observe"
    stabilize = safe["ok"]["stabilize"]
    assert stabilize["token_clip"] == {"mode": "clamp", "upper": 5.0, "lower": None}
    assert stabilize["layer_clip"]["rule"] == "zscore"
    assert stabilize["seq_clip"]["mode"] == "off"
    assert stabilize["skip_step"]["enable"] is False
    assert changed["ok"]["stabilize"]["layer_clip"]["rule"] == "adagc"
