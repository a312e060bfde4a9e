# SPDX-License-Identifier: Apache-2.0
"""Every option exists, is documented, has one default, and refuses a wrong value by its name."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACTOR = "actor_rollout_ref.actor"


def strip(tree):
    """Without Hydra's own keys."""
    if not isinstance(tree, dict):
        return tree
    return {key: strip(value) for key, value in tree.items() if key != "_target_"}


def test_the_yaml_and_the_dataclasses_say_the_same(compose):
    (answer,) = compose([])
    assert strip(answer["yaml"]) == answer["ok"]
    assert answer["spike"] is False


def flatten(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_every_option_is_documented_with_its_default_and_every_documented_one_exists(compose):
    (answer,) = compose([])
    defaults = {f"gradloc.{key}": value for key, value in flatten(answer["ok"])}
    defaults.update(
        spike_detection=False,
        grad_norm_threshold=None,
        bisect_budget_steps=128,
        bisect_dump_dir=None,
    )
    page = (ROOT / "docs" / "configuration.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]*)` \|", page, flags=re.M))
    assert documented.keys() == defaults.keys()
    for key, value in defaults.items():
        if key != "bisect_dump_dir":  # its default is a folder of the run
            shown = json.dumps(value).strip('"') if not isinstance(value, str) else value
            assert documented[key] == shown, key


WRONG = [
    (
        f"{ACTOR}.grad_norm_threshold=-1",
        "grad_norm_threshold must be null (adaptive) or a positive",
    ),
    (f"{ACTOR}.bisect_budget_steps=0", "bisect_budget_steps must be an integer of at least 1"),
    (f"{ACTOR}.bisect_dump_dir=''", "bisect_dump_dir must be the path of a folder"),
    (f"{ACTOR}.spike_detection=7", "spike_detection must be true or false"),
    (
        f"{ACTOR}.gradloc.trigger.force_step=0",
        "gradloc.trigger.force_step must be null or a global",
    ),
    (
        f"{ACTOR}.gradloc.trigger.window=4",
        "gradloc.trigger.window must be an integer of at least 8",
    ),
    (f"{ACTOR}.gradloc.trigger.warmup=999", "gradloc.trigger.warmup must be at most"),
    (
        f"{ACTOR}.gradloc.trigger.num_deviations=0",
        "gradloc.trigger.num_deviations must be null or a positive",
    ),
    (
        f"{ACTOR}.gradloc.search.strategy=magic",
        "gradloc.search.strategy must be one of auto, share",
    ),
    (f"{ACTOR}.gradloc.search.max_culprits=0", "gradloc.search.max_culprits must be an integer"),
    (f"{ACTOR}.gradloc.action.mode=panic", "gradloc.action.mode must be one of observe, mask"),
    (
        f"{ACTOR}.gradloc.action.max_masked_share=0",
        "gradloc.action.max_masked_share must be in (0, 1]",
    ),
    (f"{ACTOR}.gradloc.evidence.text=maybe", "gradloc.evidence.text must be one of on, off"),
    (f"{ACTOR}.gradloc.evidence.bundle=all", "gradloc.evidence.bundle must be one of culprits"),
    (f"{ACTOR}.gradloc.evidence.max_gb=-1", "gradloc.evidence.max_gb must be a number from 0 on"),
]


def test_a_wrong_value_is_refused_with_a_sentence_that_names_the_key(compose):
    answers = compose(*([override] for override, _ in WRONG))
    for (override, sentence), answer in zip(WRONG, answers, strict=True):
        assert f"{ACTOR}.{sentence}" in answer.get("error", ""), override


def test_the_published_knobs_work_word_for_word(compose):
    published = [
        f"{ACTOR}.spike_detection=True",
        f"{ACTOR}.grad_norm_threshold=640.0",
        f"{ACTOR}.bisect_budget_steps=128",
        f"{ACTOR}.bisect_dump_dir=/tmp/bisect_dump",
    ]
    (answer,) = compose(published)
    assert answer["spike"] is True


def test_what_is_not_supported_is_refused_while_detection_is_on(compose):
    on = f"{ACTOR}.spike_detection=True"
    cases = {
        f"{ACTOR}.strategy=veomni": f"strategy must be fsdp or fsdp2 while {ACTOR}.spike_detection is on",
        f"{ACTOR}.ulysses_sequence_parallel_size=2": "ulysses_sequence_parallel_size must be 1",
        f"{ACTOR}.fsdp_config.offload_policy=true": "fsdp_config.offload_policy must be false",
    }
    for (override, sentence), answer in zip(
        cases.items(), compose(*([on, override] for override in cases)), strict=True
    ):
        assert sentence in answer["error"], override
