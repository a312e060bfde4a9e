# SPDX-License-Identifier: Apache-2.0
"""ZeRO, stages 1 to 3, on two ranks: named, harmless, and masked as if the token had not been there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.recipes.compare import are_same
from tests.world import World
from tests.world.events import events_in

pytest.importorskip("deepspeed")
LAYOUTS = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def train() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``train(stage, dtype, ...)``: :func:`.zero.train` on two ranks."""
    with World(2, preloaded=("deepspeed", "transformers.models.llama.modeling_llama"), timeout_s=600) as world:
        yield lambda *given, name="train", **more: world.run(
            f"tests.recipes.zero.{name}", **dict(zip(("stage", "dtype"), given, strict=False)), **more
        )


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_the_planted_token_is_named_and_explained_and_the_run_is_its_own(train, tmp_path, stage, dtype):
    stock, observed = train(stage, dtype), train(stage, dtype, folder=str(tmp_path))
    assert are_same(stock, observed)
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["rank"], culprit["positions"]) == (3, 1, [5])
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_before"] == pytest.approx(stock[0]["norms"][2], rel=1e-3)


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_mask_is_the_run_without_the_token(train, tmp_path, stage, dtype):
    assert are_same(train(stage, dtype, folder=str(tmp_path), action="mask"), train(stage, dtype, is_planted=False))


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_a_search_moved_come_back(train, tmp_path, stage):
    moved = train(stage, "bfloat16", folder=str(tmp_path), search={"strategy": "share"})
    assert are_same(moved, train(stage, "bfloat16"))
    (event,) = events_in(tmp_path)
    assert [culprit["positions"] for culprit in event["culprits"]] == [[5]]


@pytest.mark.parametrize("stage", [1, 3])
def test_skip_takes_no_step(train, tmp_path, stage):
    skipped, shorter = train(stage, folder=str(tmp_path), action="skip"), train(stage)
    assert skipped[0]["norms"][:2] == shorter[0]["norms"][:2] and not are_same(skipped, shorter)
    assert events_in(tmp_path)[0]["action"]["taken"] == "skip"


def test_abort_ends_the_run_on_each_rank(train, tmp_path):
    assert all(
        "action=abort" in each["ended"] or "first process" in each["ended"]
        for each in train(3, folder=str(tmp_path), action="abort")
    )


def test_offload_trains_without_a_watch_and_says_why(train, tmp_path):
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    watched = train(2, folder=str(tmp_path), more=offloaded)
    assert [each["is_off"] for each in watched] == [3, 3] and events_in(tmp_path) == []
    assert are_same(watched, train(2, more=offloaded))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_under_accelerate_is_watched(train, tmp_path, stage):
    given = {"name": "train_by_trainer", "folder": str(tmp_path), "output": str(tmp_path / "out")}
    masked, without = train(stage, action="mask", **given), train(stage, is_planted=False, **given)
    assert are_same(masked, without) and not are_same(masked, train(stage, **given))
    assert [event["certificate"]["verdict"] for event in events_in(tmp_path)] == ["explained"]
