# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks as one batch."""

import torch

from gradloc.watch.forwarded import frozen
from gradloc.watch.rows import summaries, view_of, view_of_summaries


def rows(*names, weight=0.5, width=3):
    shape = (len(names), width)
    mask = torch.ones(shape, dtype=torch.long)
    return {
        "responses": torch.arange(len(names) * width).view(shape),
        "attention_mask": mask,
        "response_mask": mask,
        "loss_weights": torch.full(shape, weight),
        "names": [*names],
    }


def test_a_name_that_comes_twice_is_a_prompt_s_and_no_name_is_none():
    made = view_of([rows("a", "b"), rows("a", "c") | {"advantages": torch.zeros(2, 3)}])
    assert made.labels["uid"] == ["a", "b", "a", "c"]
    assert len(set(made.labels["sequence_id"])) == 4 and "loss_weights" in made.tensors
    assert view_of([rows("", "")]).labels == {}
    assert "loss_weights" not in view_of([rows("a") | {"advantages": torch.zeros(1, 3)}]).tensors


def test_a_brief_batch_has_each_row_s_length_and_signal():
    masks = [torch.tensor([[True, True, False], [True, True, True]]), torch.tensor([[False, False, True]])]
    values = [torch.tensor([[0.5, 0.5, 9.0], [-1.0, -1.0, -1.0]]), torch.tensor([[9.0, 9.0, 2.0]])]
    pairs = summaries(masks, values)
    assert pairs == [(2, 0.5), (3, -1.0), (1, 2.0)]
    made = view_of_summaries([pairs[:2], pairs[2:]], "advantages").tensors
    assert made["response_mask"].tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert made["advantages"].shape == (3, 3) and made["advantages"][:, 0].tolist() == [0.5, -1.0, 2.0]
    weights = view_of_summaries([pairs[:2], pairs[2:]], "loss_weights").tensors["loss_weights"]
    assert weights[:, 0].tolist() == [3.0, -6.0, 12.0], "of six tokens, in the unit of a whole batch"


def test_a_variable_that_has_no_value_yet_keeps_its_place():
    early = 1

    def function():
        return early, late

    kept = frozen(function)
    early, late = 2, 3
    assert kept() == (1, 3) and function() == (2, 3)
    assert frozen(len) is len
