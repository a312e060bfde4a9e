# SPDX-License-Identifier: Apache-2.0
"""The scores of answers."""

import pytest

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    "kind, answer, expected",
    [
        ("right", "4 + 3 = 7", 1.0),
        ("right", "3 * 7 = 21 days.", 1.0),
        ("right", "4 + 3 = 8", 0.0),
        ("error", "4 + 3 = 8", -1.0),
        ("error", "700", -480249.0),
        ("error", "seven", -49.0),
        ("length", "x" * 60, 0.25),
    ],
)
def test_an_answer_gets_what_its_reward_says(verl, kind, answer, expected):
    from lab.experiments.llm.reward import SCORES

    right = "21" if "days" in answer else "7"
    assert SCORES[kind](None, answer, right) == pytest.approx(expected)


def test_negative_only_pushes_wrong_answers_down_and_leaves_right_ones(verl):
    import torch

    from lab.experiments.llm.reward import negative_only

    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages, returns = negative_only(token_level_rewards=rewards, response_mask=mask, index=None, config=None)
    assert advantages.tolist() == returns.tolist() == [[0, 0, 0], [-1, -1, 0]]
