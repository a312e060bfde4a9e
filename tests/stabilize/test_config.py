# SPDX-License-Identifier: Apache-2.0
"""Off as YAML reads it, and the cautious start; tests/adapters/verl07/test_config.py has wrong values."""

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"


def test_off_may_be_written_as_yaml_reads_it_and_then_nothing_is_refused(compose):
    off = [f"{STABILIZE}.{key}=off" for key in ("token_clip.mode", "seq_clip.mode", "layer_clip.rule")]
    (answer,) = compose([*off, f"{STABILIZE}.layer_clip.group=kind", f"{ACTOR}.strategy=fsdp"])
    assert answer["ok"]["stabilize"]["layer_clip"]["rule"] == "off"


def test_safe_is_a_cautious_start_and_overrides_go_over_it(compose):
    safe, changed = compose(["+gradloc=safe"], ["+gradloc=safe", f"{STABILIZE}.layer_clip.rule=adagc"])
    stabilize = safe["ok"]["stabilize"]
    assert safe["spike"] is True and safe["ok"]["action"]["mode"] == "observe"
    assert (stabilize["token_clip"]["mode"], stabilize["layer_clip"]["rule"]) == ("clamp", "zscore")
    assert (stabilize["seq_clip"]["mode"], stabilize["skip_step"]["enable"]) == ("off", False)
    assert changed["ok"]["stabilize"]["layer_clip"]["rule"] == "adagc"
