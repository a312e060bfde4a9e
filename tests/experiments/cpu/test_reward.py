# SPDX-License-Identifier: Apache-2.0
"""The demo's reward, and the published experiment's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12+7=19, so the answer is 19.", 1.0),
        ("nonsense answer is 19.", 1.0),
        ("12+7=19, so the answer is 9.", 0.2),
        ("12+7=19, so", 0.2),
        ("12+7=18, so the answer is 18.", 0.0),
        ("the answer is 190.", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_scored_by_rule(verl, text, expected):
    from lab.experiments.cpu.reward import score

    assert score("any", text, "19") == expected


def batch(verl, tokenizer, text, **meta_info):
    ids = torch.tensor([tokenizer.encode(text)])
    mask = torch.ones(1, 2 * ids.shape[1], dtype=torch.long)
    return verl.DataProto.from_dict(
        tensors={"prompts": ids, "responses": ids, "attention_mask": mask},
        non_tensors={
            "uid": np.array(["p"], dtype=object),
            "rollout_index": np.array([0], dtype=object),
            "data_source": np.array(["arithmetic"], dtype=object),
            "reward_model": np.array([{"ground_truth": "3"}], dtype=object),
            "extra_info": np.array([{}], dtype=object),
        },
        meta_info=meta_info,
    )


RIGHT = "1+2=3, so the answer is 3."


def test_training_rows_are_shown_to_the_fault_and_validation_rows_are_not(verl, monkeypatch):
    from lab.experiments.cpu import build, fault
    from lab.experiments.cpu.reward import ArithmeticReward

    seen = []
    monkeypatch.setattr(fault, "observe", seen.append)
    tokenizer = build.make_tokenizer()
    manager = ArithmeticReward(tokenizer, 0, None, "data_source")
    manager(batch(verl, tokenizer, RIGHT, validate=True))
    assert seen == []
    reward = manager(batch(verl, tokenizer, RIGHT, demo_step=7))
    assert [(rows.step, rows.uids) for rows in seen] == [(7, ["p"])]
    assert reward.sum() == 1.0


@pytest.mark.parametrize(
    "length, ending, meta, factor",
    [
        (0, "", {"demo_step": 7}, 0.3),
        (0, "<end>", {"demo_step": 7}, 1.0),
        (1, "", {"demo_step": 7}, 1.0),
        (0, "", {"validate": True}, 1.0),
    ],
    ids=["at-the-limit-without-an-end", "at-the-limit-with-one", "under-the-limit", "validation"],
)
def test_only_a_training_response_without_an_end_in_time_is_penalized(verl, length, ending, meta, factor):
    from lab.experiments.cpu import build
    from lab.experiments.cpu.reward import ArithmeticReward

    tokenizer = build.make_tokenizer()
    manager = ArithmeticReward(tokenizer, 0, None, "data_source", runaway_penalty=0.3)
    data = batch(verl, tokenizer, RIGHT + ending, **meta)
    # `length` more columns than the response has tokens: padding, so the limit was not reached.
    pad = torch.zeros(1, length, dtype=torch.long)
    for key in ("responses", "attention_mask"):
        data.batch[key] = torch.cat([data.batch[key], pad], dim=1)
    for found in (manager(data), manager(data, return_dict=True)["reward_tensor"]):
        assert found.sum().item() == pytest.approx(factor)


def test_mathematics_is_scored_by_math_verify():
    pytest.importorskip("math_verify")
    from lab.rewards.math_verify import score

    assert score("math", r"so we get \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert score("math", r"so we get \boxed{3}", "0.5") == 0.0
