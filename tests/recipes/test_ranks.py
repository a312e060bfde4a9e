# SPDX-License-Identifier: Apache-2.0
"""A loop on two ranks, by ZeRO's stages 1 to 3 or of Megatron's own: named, harmless, and masked as without the token.

What is one package's alone is in the file of its name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.conftest import LAYOUTS, PACKAGE
from tests.world.events import events_in


def name_of(layout: dict[str, Any]) -> str:
    return " ".join(map(str, layout.values()))


each_layout = pytest.mark.parametrize("layout", LAYOUTS[PACKAGE], ids=name_of)
every_second = pytest.mark.parametrize("layout", LAYOUTS[PACKAGE][1::2], ids=name_of)


def are_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether two runs left each rank the same weights, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(
        len(a["weights"]) == len(b["weights"]) and all(map(torch.equal, a["weights"], b["weights"])) for a, b in pairs
    )


def check_named(folder: Path, stock: list[dict[str, Any]]) -> None:
    (event,) = events_in(folder)
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["rank"], culprit["positions"]) == (3, 1, [5])
    assert culprit["token_ids"] == [stock[1]["token"]]
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_before"] == pytest.approx(stock[0]["spike"], rel=1e-3)


@each_layout
def test_the_planted_token_is_named_and_explained_and_the_run_is_its_own(train, tmp_path, layout):
    stock, observed = train(**layout), train(**layout, folder=str(tmp_path))
    assert are_same(stock, observed) and stock[0]["norms"] == observed[0]["norms"]
    check_named(tmp_path, stock)


@each_layout
def test_mask_is_the_run_without_the_token(train, tmp_path, layout):
    assert are_same(train(**layout, folder=str(tmp_path), action="mask"), train(**layout, is_planted=False))


@every_second
def test_weights_that_a_search_moved_come_back(train, tmp_path, layout):
    moved = train(**layout, folder=str(tmp_path), search={"strategy": "share"})
    assert are_same(moved, train(**layout))
    assert [culprit["positions"] for culprit in events_in(tmp_path)[0]["culprits"]] == [[5]]


@every_second
def test_skip_takes_no_step(train, tmp_path, layout):
    skipped, stock = train(**layout, folder=str(tmp_path), action="skip"), train(**layout)
    assert skipped[0]["norms"][:2] == stock[0]["norms"][:2] and not are_same(skipped, stock)
    assert events_in(tmp_path)[0]["action"]["taken"] == "skip"


def test_abort_ends_the_run_on_each_rank(train, tmp_path):
    ended = [each["ended"] for each in train(**LAYOUTS[PACKAGE][-1], folder=str(tmp_path), action="abort")]
    assert all("action=abort" in each or "first process" in each for each in ended)
