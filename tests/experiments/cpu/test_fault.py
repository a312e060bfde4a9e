# SPDX-License-Identifier: Apache-2.0
"""The fault that the demo plants: where it goes, and that it goes nowhere else."""

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fault(verl):
    from lab.experiments.cpu import fault

    yield fault
    fault.arm(None)


MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
UIDS = ["p", "p", "q", "q"]


def rows(fault, step=2, uids=UIDS):
    responses = torch.arange(16).view(4, 4)
    return fault.Rows(step, list(uids), [0, 1, 0, 1], responses)


def armed(fault, tmp_path):
    fault.arm(fault.Fault(1, 2, 2, 1000.0, str(tmp_path / "planted.json")))


def test_a_seed_draws_the_same_place_everywhere_and_each_another_of_the_steps(fault):
    assert fault.FaultPlan.draw(1, 3, 6) == fault.FaultPlan(1, 5, 0.819075893664897, 0.7154095937980914)
    plans = {fault.FaultPlan.draw(seed, 3, 6) for seed in range(100)}
    assert len(plans) == 100 and {plan.step for plan in plans} == {3, 4, 5, 6}
    with pytest.raises(ValueError, match=r"at least first_step \(5\), found 4"):
        fault.FaultPlan.draw(1, 5, 4)


@pytest.mark.parametrize(
    "sequence, position, expected",
    [(0.0, 0.0, (0, 0)), (0.0, 0.999, (0, 2)), (0.5, 0.0, (2, 0)), (0.999, 0.999, (3, 0))],
    ids=["first-first", "last-real-token", "empty-row-passed-over", "last-row"],
)
def test_the_place_is_always_a_response_token(fault, sequence, position, expected):
    assert fault.FaultPlan(1, 1, sequence, position).locate(MASK) == expected


def test_only_the_planted_token_changes_and_the_record_names_it(fault, tmp_path):
    armed(fault, tmp_path)
    rewards = torch.zeros(4, 4)
    rewards[0, 2] = 1.0
    fault.observe(rows(fault))
    advantages, returns = fault.grpo_with_fault(rewards, MASK, UIDS)
    changed = (advantages != returns).nonzero().tolist()
    planted = json.loads((tmp_path / "planted.json").read_text())
    assert changed == [[planted["row"], planted["position"]]]
    row, position = changed[0]
    assert advantages[row, position] == 1000.0 == planted["advantage_planted"]
    assert planted["token_id"] == 4 * row + position
    assert planted["uid"] == UIDS[row] and planted["rollout_index"] == row % 2
    assert planted["step"] == 2 and planted["num_rows"] == 4 and planted["seed"] == 1


def test_tokens_that_the_rollout_was_surer_of_are_passed_over(fault, tmp_path):
    probabilities = torch.full((4, 4), 0.99)
    probabilities[2, 1] = 0.5
    seen = dataclasses.replace(rows(fault), log_probs=probabilities.log())
    made = fault.Fault(1, 2, 2, 1000.0, str(tmp_path / "planted.json"), surest=0.9)
    assert made.plant(seen, torch.zeros(4, 4), MASK).nonzero().tolist() == [[2, 1]]
    planted = json.loads((tmp_path / "planted.json").read_text())
    assert planted["response_ids"] == [8, 9, 10, 11], "the whole response"


def test_without_the_fault_the_advantages_are_verls_own(fault, tmp_path):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

    assert get_adv_estimator_fn("grpo_with_fault") is fault.grpo_with_fault
    rewards = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    raw = compute_grpo_outcome_advantage(rewards, MASK, UIDS, norm_adv_by_std_in_grpo=False)
    config = {"norm_adv_by_std_in_grpo": False}
    assert all(map(torch.equal, fault.grpo_with_fault(rewards, MASK, UIDS, config=config), raw))
    expected = compute_grpo_outcome_advantage(rewards, MASK, UIDS)
    assert all(map(torch.equal, fault.grpo_with_fault(rewards, MASK, UIDS), expected))
    armed(fault, tmp_path)
    fault.observe(rows(fault, step=1))
    assert all(map(torch.equal, fault.grpo_with_fault(rewards, MASK, UIDS), expected))
    assert not (tmp_path / "planted.json").exists()


def test_rows_that_were_not_observed_are_refused(fault, tmp_path):
    armed(fault, tmp_path)
    fault.observe(rows(fault, uids=["q", "p", "p", "q"]))
    with pytest.raises(RuntimeError, match="reward manager"):
        fault.grpo_with_fault(torch.zeros(4, 4), MASK, UIDS)
