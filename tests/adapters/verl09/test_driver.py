# SPDX-License-Identifier: Apache-2.0
"""In a healthy step the driver reads nothing that verl does not read anyway."""

import torch

GRPO = ["algorithm.adv_estimator=grpo"]


def test_a_healthy_step_fetches_nothing_that_verl_does_not_fetch(call, tmp_path):
    on = ["+gradloc=on", f"actor_rollout_ref.actor.gradloc.dump_dir={tmp_path}", "trainer.health.enable=true"]
    ours, verl = call("fetched", [*on, *GRPO])[0], call("fetched", GRPO, stock=True)[0]
    assert ours["num_reads"] == verl["num_reads"]
    seen, later = ours["facts"]
    mask, scores = ours["rows"]["response_mask"], ours["rows"]["rm_scores"]
    for facts in (seen, later):
        assert torch.equal(facts["num_tokens"], mask.sum(1)), "in the order of the batch that is dealt out"
        assert torch.allclose(facts["rewards"], scores.sum(1))
    assert set(later["signal"].tolist()) == {5.0}, "what changed since is read again"
    assert seen["signal"].abs().max() < 5.0
