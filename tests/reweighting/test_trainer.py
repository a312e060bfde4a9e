# SPDX-License-Identifier: Apache-2.0
"""Both methods in the real trainer, whatever makes the advantages: `pytest -m slow`."""

import json

import pytest

from tests.experiments.real import run_to_the_end

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

METHODS = ["algorithm.advantage_reweighting.alpha=0.3", "algorithm.lopti.enable=true", "algorithm.lopti.eta=0.9"]
SPIKES = ["actor_rollout_ref.actor.spike_detection=true"]
RUNS = {
    "GRPO, bucket analysis, KL and entropy": ["buckets-demo", "demo.steps=2", *SPIKES],
    "REINFORCE++": [
        "buckets-demo",
        "demo.steps=2",
        *SPIKES,
        "algorithm.adv_estimator=reinforce_plus_plus",
        "trainer.gradient_analysis_mode=False",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    ],
    "PPO with a critic": ["buckets-demo-ppo", "trainer.exit_after_gradient_analysis=False"],
}


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_both_methods_run_with_every_kind_of_advantage(tmp_path, patched_tree, arguments):
    folder = tmp_path / "run"
    run_to_the_end(*arguments, *METHODS, run_dir=folder, VERL_REPO=str(patched_tree))
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)["data"]
        assert 0 < metrics["advantage_reweighting/kept_share"] < 1
        assert metrics["lopti/low/share"] + metrics["lopti/high/share"] == pytest.approx(1)
        for stage in ("low", "high"):
            assert metrics[f"lopti/{stage}/grad_norm"] > 0
        both = metrics["lopti/low/pg_loss"] + metrics["lopti/high/pg_loss"]
        assert metrics["actor/pg_loss"] == pytest.approx(both, rel=1e-6)
