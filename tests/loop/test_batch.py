# SPDX-License-Identifier: Apache-2.0
"""A few numbers of each row describe a healthy step, from padded tensors and from those without padding."""

import pytest
import torch

from gradloc.loop.batch import BatchView, RowFacts, batch_scale

LENGTHS = (5, 0, 3, 7)


def rows(seed=0):
    """Mask, advantages and scores (R, T); the first token of one row is not trained on, and a row has no token."""
    drawn = torch.Generator().manual_seed(seed)
    is_there = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    mask = is_there.long()
    mask[0, 0] = mask[3, 2] = 0
    return is_there, mask, *(torch.randn(mask.shape, generator=drawn) * is_there for _ in range(2))


def nested(values, is_there):
    return torch.nested.as_nested_tensor(
        [row[kept] for row, kept in zip(values, is_there, strict=False)], layout=torch.jagged
    )


@pytest.mark.parametrize("is_nested", [False, True])
def test_facts_are_what_a_loop_over_the_rows_finds(is_nested):
    is_there, mask, advantages, scores = rows()
    given = mask, advantages, scores
    if is_nested:
        made = RowFacts.from_nested(*(nested(values, is_there) for values in given))
    else:
        made = RowFacts.from_padded(*given)
    for row, length in enumerate(LENGTHS):
        kept = [place for place in range(length) if mask[row, place]]
        assert made.num_tokens[row] == len(kept)
        assert made.rewards[row] == pytest.approx(float(scores[row].sum()), abs=1e-6)
        assert not kept or made.signal[row] == advantages[row, kept[0]]
    assert sorted(made.sample[made.sample != 0].tolist()) == sorted(advantages[mask.bool()].tolist())
    turned = made.at(torch.tensor([3, 0]))
    assert turned.num_tokens.tolist() == made.num_tokens[[3, 0]].tolist() and turned.sample is made.sample


def test_facts_that_the_trainer_has_stand_for_its_tensors():
    _, mask, advantages, scores = rows()
    plain = BatchView({"response_mask": mask, "advantages": advantages, "token_level_scores": scores})
    known = BatchView({}, known=lambda: RowFacts.from_padded(mask, advantages, scores))
    assert batch_scale(plain, [0.5, 2.0]) == batch_scale(known, [0.5, 2.0])
    assert batch_scale(plain, [])["advantage"] == pytest.approx(float(advantages[mask.bool()].abs().median()))


def test_a_large_batch_is_known_by_tokens_that_are_evenly_spread():
    drawn = torch.Generator().manual_seed(1)
    mask, advantages = torch.ones(64, 2**16, dtype=torch.bool), torch.randn(64, 2**16, generator=drawn)
    found = RowFacts.from_padded(mask, advantages)
    assert len(found.sample) < mask.numel() / 2
    assert float(found.sample.abs().median()) == pytest.approx(float(advantages.abs().median()), rel=0.01)


def test_how_long_rows_are_is_known_whatever_shape_another_column_has():
    view = BatchView({"response_mask": torch.ones(3, 4, dtype=torch.long), "advantages": torch.ones(2, 9)})
    assert view.num_tokens.tolist() == [4, 4, 4]
