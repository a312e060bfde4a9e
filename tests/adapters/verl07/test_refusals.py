# SPDX-License-Identifier: Apache-2.0
"""A run in which a feature could not work is refused by name, whichever feature asks."""

from types import SimpleNamespace

import pytest

from gradloc.adapters.verl07.refusals import check_run
from gradloc.adapters.verl_common.analyses import refuse_pictures

ACTOR = "actor_rollout_ref.actor"
KERNELS = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
LETS_IT_BE = {"actor_rollout_ref.rollout.calculate_log_probs": True, "actor_rollout_ref.model.use_fused_kernels": True}
EVERYWHERE = [
    ("trainer.use_legacy_worker_impl", "disable", "auto or enable"),
    (f"{ACTOR}.strategy", "megatron", "fsdp or fsdp2"),
]
WHOLE_SEQUENCES = [(f"{ACTOR}.ulysses_sequence_parallel_size", 2, "1")]
OFFLOAD = ("actor_rollout_ref.model.enable_activation_offload", True, "false")
FEATURES = {
    f"{ACTOR}.spike_detection": [
        *EVERYWHERE,
        OFFLOAD,
        (KERNELS, "triton", "torch"),
    ],
    f"{ACTOR}.gradloc.stabilize": EVERYWHERE + WHOLE_SEQUENCES,
    f"{ACTOR}.gradloc.stabilize.token_clip or seq_clip": [
        ("actor_rollout_ref.rollout.calculate_log_probs", False, "true")
    ],
    "algorithm.lopti.enable": EVERYWHERE,
    "trainer.gradient_analysis_mode": [*EVERYWHERE, *WHOLE_SEQUENCES, OFFLOAD],
    "trainer.quartile_analysis_mode": [*EVERYWHERE, *WHOLE_SEQUENCES, OFFLOAD],
}


def make(**settings):
    """A whole config with these keys, and the others as a run has them that everything works in."""
    config = SimpleNamespace()
    for key, value in {f"{ACTOR}.strategy": "fsdp2", **settings}.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section.__dict__.setdefault(part, SimpleNamespace())
            section = getattr(section, part)
        setattr(section, name, value)
    return config


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_names_the_setting_that_it_cannot_work_with(feature):
    for key, value, expected in FEATURES[feature]:
        with pytest.raises(ValueError) as refusal:
            check_run(feature, make(**{**LETS_IT_BE, key: value}))
        assert str(refusal.value).startswith(f"{key} must be {expected} while {feature} is on (")
        assert str(refusal.value).endswith(f"), found {value!r}.")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_config_that_lacks_the_keys_has_their_defaults(feature):
    check_run(feature, make(**{"actor_rollout_ref.rollout.calculate_log_probs": True}))


def test_the_analyses_refuse_images_by_their_own_name():
    """verl's agent loop names the key in text-only runs too, with an empty dict for each row."""
    feature = "trainer.gradient_analysis_mode"
    for rows in ((), ({}, {})):
        refuse_pictures(feature, rows)
    with pytest.raises(ValueError, match=f"{feature} does not take batches with multi_modal_inputs"):
        refuse_pictures(feature, ({}, {"pixel_values": [1.0]}))
