# SPDX-License-Identifier: Apache-2.0
"""One sequence on several ranks: every token counts once, and what is found is the oracle's."""

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
PLANTS = [(2, 3, -1e4), (11, 5, -8e3)]
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
ULYSSES = ["actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_shares_and_certificate_are_the_oracles(four_ranks, dump_dir, strategy):
    settings = [*TAU, *ULYSSES, f"{ACTOR}.strategy={strategy}", f"{ACTOR}.entropy_coeff=0.05"]
    found, *_ = four_ranks.run("spikes.localize_planted", plants=PLANTS, overrides=settings, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    assert event["step"]["sp_size"] == 2 and event["step"]["dp_size"] == 2
    assert event["trigger"]["grad_norm"] == pytest.approx(found["oracle_norm"], rel=1e-4)
    assert sorted((c["row"], c["positions"][0]) for c in event["culprits"]) == found["planted"]
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=2e-3)
    assert event["shares"]["closure"] == pytest.approx(1, abs=0.01)
    truth = zip(event["culprits"], found["oracle_shares"], found["oracle_culprit_norms"], strict=True)
    for culprit, share, norm in truth:
        assert culprit["share"] == pytest.approx(share, abs=2e-3)
        assert culprit["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "same"), [("mask", "as_without"), pytest.param("observe", "as_spiked", marks=pytest.mark.slow)]
)
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(four_ranks, dump_dir, mode, same):
    settings = [*TAU, f"{ACTOR}.gradloc.action.mode={mode}"]
    found = four_ranks.run("actions.train_epochs", overrides=settings, dump_dir=dump_dir, layout=ULYSSES)
    assert all(rank[same] for rank in found), "bit for bit"
    assert found[0]["metrics"]["gradloc/spikes"] == [3]
