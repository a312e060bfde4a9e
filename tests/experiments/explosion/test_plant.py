# SPDX-License-Identifier: Apache-2.0
"""The explosion plants a row, a token, a ratio and an advantage, and nothing else."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def plant(verl):
    from lab.experiments.explosion import plant

    return plant


@pytest.fixture(scope="module")
def rollout(verl):
    from lab.experiments.explosion import rollout

    return rollout


SETTINGS = {
    "is_stale": True,
    "warning_step": 3,
    "warning_probability": 1e-4,
    "spike_step": 4,
    "old_probability": 1e-5,
    "num_stale": 1,
    "sure": 0.9,
    "advantage": 0.8,
}
PARAMS = {"temperature": 1.0, "top_p": 1.0, "do_sample": True, "max_new_tokens": 6, "pad_token_id": 0}
# Probabilities of one response's tokens: 0.93 is the least sure that still counts as sure.
LOG_PROBS = [math.log(p) for p in (0.999, 0.5, 0.93, 0.89, 0.97)]


@pytest.mark.parametrize(
    ("changes", "positions"),
    [({}, [2]), ({"num_stale": 2}, [2, 4]), ({"num_stale": 200}, [0, 2, 4]), ({"is_stale": False}, [])],
    ids=["least-sure", "more", "only-sure-ones", "healthy-twin"],
)
def test_the_stale_tokens_are_the_least_sure_of_the_sure_ones(plant, changes, positions):
    assert plant.choose(plant.Settings(**{**SETTINGS, **changes}), LOG_PROBS) == positions


def test_a_response_without_a_sure_token_is_refused(plant):
    with pytest.raises(ValueError, match="lower explosion.sure"):
        plant.choose(plant.Settings(**SETTINGS), [math.log(0.5)] * 3)


@pytest.mark.parametrize(
    "key, value, problem",
    [
        ("warning_step", 4, "before explosion.spike_step, found 4 and 4"),
        ("warning_step", 0, "at least 1"),
        ("old_probability", 0.0, "explosion.old_probability must be between 0 and 1, found 0.0"),
        ("sure", 1.0, "explosion.sure must be between"),
        ("num_stale", 0, "explosion.num_stale must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(plant, key, value, problem):
    with pytest.raises(ValueError, match=problem):
        plant.Settings(**{**SETTINGS, key: value})


def test_the_row_is_the_same_on_every_machine_and_any_row_can_be_it(plant):
    assert [plant.draw_row(1, step, 64) for step in (7, 8)] == [9, 24]
    assert {plant.draw_row(seed, 7, 4) for seed in range(50)} == {0, 1, 2, 3}


def test_only_the_marked_token_gets_the_old_policys_log_prob(plant):
    planted = plant.marks(3, 5, row=1, length=4, positions=[2])
    assert planted.tolist() == [[0] * 5, [1, 1, 2, 1, 0], [0] * 5]
    log_probs = torch.rand(3, 5).log()
    changed = plant.as_sampled(log_probs, planted, 1e-5)
    assert (changed != log_probs).nonzero().tolist() == [[1, 2]]
    # What the loss makes of it: a token near 1 now has a ratio of about 100 000.
    assert torch.exp(math.log(0.93) - changed[1, 2]).item() == pytest.approx(93_000, rel=1e-4)


def test_the_actor_stores_the_rollouts_log_prob_for_the_stale_token_only(plant, rollout):
    computed, entropy = torch.rand(3, 4), torch.rand(3, 4)
    wrapped = rollout.store_stale_log_probs(lambda _, data, calculate_entropy: (computed, entropy))
    fields = {"rollout_log_probs": torch.full((3, 4), -9.0)}
    unmarked = wrapped(None, SimpleNamespace(batch=fields), calculate_entropy=True)
    assert torch.equal(unmarked[0], computed)
    fields[plant.KEY] = plant.marks(3, 4, row=2, length=4, positions=[1])
    log_probs, same = wrapped(None, SimpleNamespace(batch=fields), calculate_entropy=True)
    assert (log_probs != computed).nonzero().tolist() == [[2, 1]] and log_probs[2, 1] == -9.0
    assert same is entropy


def test_the_real_actors_method_is_wrapped(rollout):
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    assert DataParallelPPOActor.compute_log_prob.__module__ == rollout.__name__


@pytest.fixture
def observe(verl, tmp_path, monkeypatch):
    """Return a function that passes rows with these marks to the estimator; the run's folder is temporary."""
    from lab.experiments.cpu import build, fault
    from lab.experiments.explosion import plant

    monkeypatch.setenv("GRADLOC_RUN_DIR", str(tmp_path))
    tokenizer = build.make_tokenizer()

    def observe_marks(uids, marks):
        responses = torch.arange(marks.numel()).view_as(marks) % 20
        rows = fault.Rows(step=3, uids=list(uids), rollout_indices=[0, 1, 0][: len(uids)], responses=responses)
        plant.observe(rows, marks, 0.8, tokenizer)
        record = tmp_path / plant.RECORD
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    yield observe_marks
    fault.arm(None)


def test_the_planted_row_gets_its_advantage_and_the_others_verls_own(observe, plant):
    from lab.experiments.cpu import fault
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards, mask, uids = torch.rand(3, 4), torch.ones(3, 4), np.array(["p", "p", "q"])
    expected, returns = compute_grpo_outcome_advantage(rewards, mask, uids)
    observe(uids, plant.marks(3, 4, row=1, length=3, positions=[0]))
    advantages, same = fault.grpo_with_fault(rewards, mask, uids)
    assert advantages[1].tolist() == pytest.approx([0.8, 0.8, 0.8, expected[1, 3].item()])
    assert torch.equal(advantages[[0, 2]], expected[[0, 2]]) and torch.equal(same, returns)


def test_the_record_names_row_sequence_positions_and_tokens(observe, plant):
    assert observe("pq", plant.marks(2, 4, row=0, length=0, positions=[])) == []
    (line,) = observe(["p", "p", "q"], plant.marks(3, 4, row=1, length=3, positions=[0, 2]))
    assert line.pop("text")
    assert line == {
        "step": 3,
        "uid": "p",
        "rollout_index": 1,
        "row": 1,
        "num_rows": 3,
        "length": 3,
        "positions": [0, 2],
        "token_ids": [4, 6],
    }


@pytest.fixture(scope="module")
def server(rollout, material):
    """A `SavingRollout` without a worker around it."""
    from transformers import AutoModelForCausalLM

    made = rollout.SavingRollout.__new__(rollout.SavingRollout)
    made.model = AutoModelForCausalLM.from_pretrained(material / "model").eval()
    return made


def test_the_long_response_has_no_end_and_the_policys_own_log_probs(server):
    prompt, params = [7, 8, 9], {**PARAMS, "temperature": 0.7, "max_new_tokens": 12, "is_long": True}
    ((tokens, log_probs),) = server.generate([prompt], params, 5)
    assert len(tokens) == 12 and server.model.generation_config.eos_token_id not in tokens
    # Token by token, from a forward of its own.
    for i, token in enumerate(tokens):
        logits = server.model(input_ids=torch.tensor([prompt + tokens[:i]])).logits[0, -1]
        expected = (logits / 0.7).log_softmax(-1)[token].item()
        assert log_probs[i] == pytest.approx(expected, abs=1e-4)


def test_an_ordinary_rollout_is_the_demos(server, rollout):
    from lab.experiments.cpu.rollout import HFRollout

    answers = server.generate([[7, 8], [9]], PARAMS, 5)
    assert answers == HFRollout.generate(server, [[7, 8], [9]], PARAMS, 5)
