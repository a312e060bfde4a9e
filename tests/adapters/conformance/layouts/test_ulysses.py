# SPDX-License-Identifier: Apache-2.0
"""One sequence on several ranks: every token counts once, and what is found is the oracle's."""

import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, MODES, PLANTS, TAU, check_planted, check_training
from tests.trainers import NONE, default_on

ULYSSES = ["actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"]


@default_on(verl07=NONE, verl09=("fsdp2",))
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_shares_and_certificate_are_the_oracles(four_ranks, dump_dir, strategy):
    settings = [TAU, *ULYSSES, f"{ACTOR}.strategy={strategy}", f"{ACTOR}.entropy_coeff=0.05"]
    event, _ = check_planted(four_ranks, dump_dir, PLANTS, settings, share=2e-3, closure=0.01)
    assert event["step"]["sp_size"] == 2 and event["step"]["dp_size"] == 2


@default_on(verl07=NONE, verl09=NONE)
@MODES
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(four_ranks, dump_dir, mode):
    check_training(four_ranks, dump_dir, mode, layout=ULYSSES)
