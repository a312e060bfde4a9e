# SPDX-License-Identifier: Apache-2.0
"""The tests of verl 0.7's actor, run by the same code on verl 0.9's engine."""

import importlib.metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent

NOT_HERE = {
    "and_not_with_an_analysis": "the schedule is that of verl 0.7's worker",
    "the_page_shows_these_distances": "the page shows those of verl 0.7's loss",
    "[fused, FSDP2": "verl 0.9.1 itself fails: FSDP2 shards an untied head apart, and the kernel takes its weight",
    "stages_are_told_apart": "verl 0.9's trainer has reduced the metrics of each update: test_parity.py",
    "[padding": "verl 0.9's batches have no padding",
    "-padding]": "verl 0.9's batches have no padding",
}
"""Part of a test's name, and why verl 0.9 has nothing to test there."""
BY_DEFAULT: dict[str, tuple[str, ...]] = {
    "run_with_it[": ("[pushed down]", "[reference, kl]"),
    "setting_takes_bit_for_bit": ("[float32-pushed down]",),
    "found_and_nothing_else[": ("weights kept after forward by auto]", "FSDP1, original parameters by auto]"),
    "heard_by_all_and_recovered[bisect]": (),
    "never_reaches_training": ("[file in the way",),  # trouble with telling is not the engine's
    "under_every_loss": ("[cispo]",),
    "add_up_however_they_are_grouped": ("[FSDP1]", "[FSDP2, entropy and KL]"),
    "runs_its_row_alone": ("[FSDP1]", "[FSDP2, bf16]"),
    "random_numbers_would_be_others": ("[FSDP2]",),
    "without_the_culprits_bit_for_bit": ("[dropout-",),
    "healthy_twins": (),
    "from_the_cap_to_its_end": (),
    "each_masked_step_says": (),
    "parts_of_unequal_buckets": ("[seq-mean-token-mean]",),
    "parts_add_up_whatever_the_policy_loss": ("[clip_cov]",),
    "however_the_batch_is_sharded_and_cut": ("[fsdp1]", "[dynamic micro-batches]"),
    "the_gradient_that_training_takes": ("[seq-mean-token-mean]",),
    "the_batch_is_cut_and_whatever_the_loss": ("[dynamic, fsdp1]", "[clip_cov]"),
    "every_token_on_a_plain_model": ("[entropy and kl terms]",),
    "all_other_tokens_leaves": ("[fsdp2-quantile]", "[fsdp-range]"),
    "literal_copy_of_model_and_optimizer": ("[2-fsdp2]",),
    "with_tried_updates_is_bit_identical": ("[fsdp1]", "[dynamic]", "[adapters]"),
    "before_its_first_step": ("[fsdp2]",),
    "at_frozen_weights": ("[FSDP1, KL]", "[entropy and KL]"),
    "clipped_by_plain_loops": ("[FSDP2 by kind-", "[FSDP1 with original parameters, by tensor-"),
    "keep_their_direction_and_size": ("[FSDP2 by kind-", "[FSDP1 with original parameters, by tensor-"),
    "weights_and_moments_as_they_were": ("[FSDP1]", "[fp16]"),
    "teaches_nothing_and_is_counted": ("[FSDP1]",),
    "a_stabilized_run_as_it_would": ("[FSDP2]",),
    "goes_on_bit_by_bit": ("[FSDP2, z-score, two mini-batches]", "[FSDP1, adagc, localization, too]"),
    "times_the_slow_weights": (
        "[both-FSDP2]",
        "[seq_clip masks on both sides-FSDP1]",
        "[token_clip masks above-FSDP2]",
    ),
    "through_the_clips": ("[FSDP1]", "[FSDP2, bisect]"),
}
"""Part of a test's name, and those of its cases that the default tests have here; verl 0.7's have them all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        for name, reason in NOT_HERE.items():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
        for name, cases in BY_DEFAULT.items():
            if name in item.name and not any(case in item.name for case in cases):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def verl_version(verl09: None) -> str:
    """The installed verl's."""
    return importlib.metadata.version("verl")
