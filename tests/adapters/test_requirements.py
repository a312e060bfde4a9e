# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of what is refused on verl refuses its setting, for each feature and verl that it names."""

import re
from types import SimpleNamespace

import pytest

from gradloc.adapters.verl_common import requirements as needs
from gradloc.adapters.verl_common.requirements import CRITIC, TABLE, check_needs, refuse_pictures
from tests.world import REPO

ACTOR = "actor_rollout_ref.actor"
EVERYTHING_WORKS = {
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config.use_orig_params": True,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "critic.strategy": "fsdp2",
    "critic.enable": True,
}
ON = {"all": ("0.7",), "0.10": ("0.9", "0.10"), "megatron": ("0.9", "megatron")}
ROWS = [(verl, feature, need) for need, where in TABLE for verl, features in where.items() for feature in features]


def make(**settings):
    """A whole config with these keys, and what no default lets pass."""
    config = SimpleNamespace()
    for key, value in {**EVERYTHING_WORKS, **settings}.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section.__dict__.setdefault(part, SimpleNamespace())
            section = getattr(section, part)
        setattr(section, name, value)
    return config


@pytest.mark.parametrize("feature", sorted({feature for _, feature, _ in ROWS} - {CRITIC}))
def test_a_feature_names_the_setting_that_it_cannot_work_with(feature):
    for on, need in {(ON.get(verl, (verl,)), need) for verl, of, need in ROWS if of == feature}:
        check_needs(on, [feature], make())
        wrong = {need.key: "another"} | ({need.only_with: True} if need.only_with else {})
        with pytest.raises(ValueError) as refusal:
            check_needs(on, [feature], make(**wrong))
        said = f"{need.key} must be {need.expected} while {feature} is on ({need.because}), found 'another'."
        assert str(refusal.value) == said
        if need.only_with:
            check_needs(on, [feature], make(**{need.key: "another"}))


CLIPS = {"clip_tokens", "clip_sequences"}


@pytest.mark.parametrize(
    ("on", "settings", "refused"),
    [
        (["0.7"], {}, set()),
        (["0.9"], {"actor_rollout_ref.rollout.calculate_log_probs": False}, set()),
        (["0.7"], {f"{ACTOR}.ulysses_sequence_parallel_size": 2}, CLIPS),
        (["0.9", "megatron"], {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}, CLIPS),
        (["0.9"], {"distillation.enabled": True}, CLIPS | {"reweight"}),
    ],
)
def test_no_setting_is_measured_that_the_run_would_be_refused_with(on, settings, refused):
    assert needs.refused_cures(on, make(**settings)) == refused


STABILIZE = f"{ACTOR}.gradloc.stabilize"
SWITCHES = {
    needs.SPIKES: "",
    needs.CRITIC: f"{ACTOR}.gradloc.critic=observe algorithm.adv_estimator=gae",
    needs.STABILIZE: f"{STABILIZE}.skip_step.enable=true",
    needs.RATIO_CLIPS: f"{STABILIZE}.token_clip.mode=mask actor_rollout_ref.rollout.calculate_log_probs=true",
    needs.FINE_LAYER_CLIP: f"{STABILIZE}.layer_clip.rule=adagc {STABILIZE}.layer_clip.group=kind {ACTOR}.strategy=fsdp",
    needs.REWEIGHTING: "algorithm.advantage_reweighting.alpha=0.3",
    needs.LOPTI: "algorithm.lopti.enable=true",
    needs.BUCKETS: "trainer.gradient_analysis_mode=true",
    needs.QUARTILES: "trainer.quartile_analysis_mode=true",
    needs.FILTER: "actor_rollout_ref.rollout.rollout_filter_value=0.5",
}
"""Feature -> overrides of verl's config that switch it on."""


def refusals(*verls):
    """For each row of these verls: overrides of a run that it refuses, and what is said to it, as a pattern."""
    found = {}
    for need, where in TABLE:
        features = [feature for verl in verls for feature in where.get(verl, ())]
        if features:
            right = need.allowed[0]
            wrong = str(not right).lower() if isinstance(right, bool) else "2" if right == 1 else "another"
            wrong = "before_step" if need.key.endswith("evidence.checkpoint") else wrong  # no other word is one
            given = [f"{need.only_with}=true"] * bool(need.only_with) + [f"{need.key}={wrong}"]
            given = [f"++{each}" if ".override_" in each else each for each in given]  # which verl's yaml does not have
            alone = [f"{ACTOR}.gradloc.enable=null"] * (features[-1] != needs.SPIKES)
            run = " ".join([SWITCHES[features[-1]], *alone, *given])
            found[run] = re.escape(f"{need.key} must be {need.expected} while ")
    return found


OF_THE_TABLE = [
    ("0.7", f"{ACTOR}.gradloc.enable", "trainer.use_legacy_worker_impl", "auto or enable"),
    ("0.7", f"{ACTOR}.gradloc.enable", "actor_rollout_ref.model.enable_activation_offload", "false"),
    ("0.7", f"{ACTOR}.gradloc.stabilize", f"{ACTOR}.ulysses_sequence_parallel_size", "1"),
    ("0.7", "algorithm.lopti.enable", f"{ACTOR}.strategy", "fsdp or fsdp2"),
    ("0.7", "trainer.quartile_analysis_mode", f"{ACTOR}.ulysses_sequence_parallel_size", "1"),
    ("0.9", f"{ACTOR}.gradloc.enable", f"{ACTOR}.strategy", "fsdp, fsdp2 or megatron"),
    ("0.9", f"{ACTOR}.gradloc.stabilize", f"{ACTOR}.qat.enable", "false"),
    ("0.9", "trainer.gradient_analysis_mode", f"{ACTOR}.loss_agg_mode", "one of verl's means"),
    ("0.9", "algorithm.advantage_reweighting.alpha", "distillation.enabled", "false"),
    ("megatron", f"{ACTOR}.gradloc.enable", f"{ACTOR}.megatron.override_transformer_config.fp8", "none"),
    ("megatron", f"{ACTOR}.gradloc.enable", "actor_rollout_ref.model.lora.rank", "0"),
]


@pytest.mark.parametrize("row", OF_THE_TABLE, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_the_table_says_what_was_not_run(row):
    assert row in [(verl, feature, need.key, need.expected) for verl, feature, need in ROWS]


def test_the_analyses_refuse_images_by_their_own_name():
    """verl's agent loop names the key in text-only runs too, with an empty dict for each row."""
    feature = "trainer.gradient_analysis_mode"
    for rows in ((), ({}, {})):
        refuse_pictures(feature, rows)
    with pytest.raises(ValueError, match=f"{feature} does not take batches with multi_modal_inputs"):
        refuse_pictures(feature, ({}, {"pixel_values": [1.0]}))


IN_WORDS = {
    "context_parallel": "dynamic context parallelism",
    "lora": "LoRA",
    ".dtype": "any `dtype` but bfloat16",
    "fp8": "fp8",
    "fp4": "fp4",
    "cuda_graph": "CUDA graphs",
    "megatron_fsdp": "Megatron-FSDP",
    "optim.optimizer": "any optimizer but",
    "mtp.": "multi-token prediction",
    "router_replay": "router replay",
    "qat.": "quantization-aware training",
    "dropout": "dropout",
    "pipeline": "with a pipeline",
}
"""Part of a setting's key -> its name on the page; others have their own."""


def test_the_page_names_all_that_is_refused_on_megatron():
    page = (REPO / "docs" / "megatron.md").read_text(encoding="utf-8").partition("## Refused")[2]
    refused = {need.key for verl, _, need in ROWS if verl == "megatron"}
    for key in refused:
        words = [word for part, word in IN_WORDS.items() if part in key] or [
            key.rpartition(".")[2],
            key.split("actor.")[-1],
        ]
        assert any(word in " ".join(page.split()) for word in words), key
