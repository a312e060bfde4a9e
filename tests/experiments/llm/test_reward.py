# SPDX-License-Identifier: Apache-2.0
"""The score of an answer."""

import pytest

pytest.importorskip("math_verify")


def test_an_answer_gets_1_if_it_is_right(verl):
    from experiments.llm.reward import TaskReward

    manager = TaskReward(None, 0, None, "data_source")
    assert [manager.compute_score(None, text, "7") for text in ("4 + 3 = 7", "It is 7 days.", "4 + 3 = 8")] == [1, 1, 0]
