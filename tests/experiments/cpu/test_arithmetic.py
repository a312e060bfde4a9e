# SPDX-License-Identifier: Apache-2.0
"""The demo's questions and answers."""

import pytest

from lab.experiments.cpu.arithmetic import LARGEST, Addition, draw, to_row


def test_a_seed_draws_the_same_additions_none_of_them_twice():
    every = (LARGEST + 1) ** 2
    assert draw(20, "a") == draw(20, "a") != draw(20, "b")
    assert len(set(draw(every, "all"))) == every
    with pytest.raises(ValueError):
        draw(every + 1, "too many")


def test_a_row_has_the_columns_that_verl_reads():
    row = to_row(3, Addition(1, 2), "val")
    assert row["prompt"] == [{"role": "user", "content": "What is 1+2?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert row["extra_info"] == {"index": 3, "split": "val"}
    assert row["data_source"]
