# SPDX-License-Identifier: Apache-2.0
"""A loop of Megatron's own, on two ranks: named, harmless, and masked as if the token had not been there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.compare import are_same
from tests.world import World
from tests.world.events import events_in

LAYOUTS = [(dtype, is_distributed) for dtype in ("float32", "bfloat16") for is_distributed in (False, True)]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"is_tied": True},
    "per token": {"more": {"calculate_per_token_loss": True}},
    "logits": {"is_loss_outside": True},
    "slime's": {"is_loss_outside": True, "is_packed": True, "asks_norm": True, "dtype": "bfloat16"},
    "recomputed": {"more": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    "not clipped": {"clip_grad": 0.0},
    "a group of its own norm": {"more": {"mtp_group": "output_layer"}},
    "reduced meanwhile": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 10_000}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "overlap_param_gather=True": {
        "is_distributed": True,
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "hidden_dropout=0.1": {"more": {"hidden_dropout": 0.1}},
    "tensor parallelism": {"tensor": 2},
    "an optimizer other than Megatron's own": {"has_optimizer": False},
}


@pytest.fixture(scope="module")
def train() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``train(dtype, is_distributed, ...)``: :func:`.megatron.train` on two ranks."""
    with World(2, preloaded=("megatron.core.optimizer", "megatron.core.models.gpt"), timeout_s=600) as world:

        def run(*given: Any, name: str = "train", **more: Any) -> list[Any]:
            named = dict(zip(("dtype", "is_distributed"), given, strict=False))
            return world.run(f"tests.recipes.megatron.{name}", **named, **more)

        yield run


def check_named(folder: Path, stock: dict[str, Any]) -> None:
    (event,) = events_in(folder)
    (culprit,) = event["culprits"]
    assert (event["step"]["global_step"], culprit["rank"], culprit["positions"]) == (3, 1, [5])
    assert culprit["token_ids"] == [stock["token"]]
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_before"] == pytest.approx(stock["norm_of_all"], rel=1e-3)


@pytest.mark.parametrize(("dtype", "is_distributed"), LAYOUTS)
def test_the_planted_token_is_named_and_explained_and_the_run_is_its_own(train, tmp_path, dtype, is_distributed):
    stock, observed = train(dtype, is_distributed), train(dtype, is_distributed, folder=str(tmp_path))
    assert are_same(stock, observed) and stock[0]["norms"] == observed[0]["norms"]
    check_named(tmp_path, stock[0])


@pytest.mark.parametrize(("dtype", "is_distributed"), LAYOUTS)
def test_mask_is_the_run_without_the_token(train, tmp_path, dtype, is_distributed):
    masked = train(dtype, is_distributed, folder=str(tmp_path), action="mask")
    assert are_same(masked, train(dtype, is_distributed, is_planted=False))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_of_another_shape(train, tmp_path, shape):
    given = SHAPES[shape]
    assert are_same(train(**given), train(folder=str(tmp_path / "observe"), **given))
    masked, without = train(folder=str(tmp_path), action="mask", **given), train(is_planted=False, **given)
    assert are_same(masked, without)
    check_named(tmp_path / "observe", train(**given)[0])


@pytest.mark.parametrize(("dtype", "is_distributed"), LAYOUTS[1:3])
def test_weights_that_a_search_moved_come_back(train, tmp_path, dtype, is_distributed):
    moved = train(dtype, is_distributed, folder=str(tmp_path), search={"strategy": "share"})
    assert are_same(moved, train(dtype, is_distributed))
    assert [culprit["positions"] for culprit in events_in(tmp_path)[0]["culprits"]] == [[5]]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_skip_takes_no_step(train, tmp_path, is_distributed):
    skipped, stock = (
        train("float32", is_distributed, folder=str(tmp_path), action="skip"),
        train("float32", is_distributed),
    )
    assert skipped[0]["norms"][:2] == stock[0]["norms"][:2] and not are_same(skipped, stock)
    assert events_in(tmp_path)[0]["action"]["taken"] == "skip"


def test_a_clip_is_the_one_of_megatrons_step(train):
    for own, ours in train(name="clip_twice"):
        assert own and all(map(torch.equal, own, ours))


def test_abort_ends_the_run_on_each_rank(train, tmp_path):
    ended = [each["ended"] for each in train(folder=str(tmp_path), action="abort")]
    assert all("action=abort" in each or "first process" in each for each in ended)


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_not_run_is_refused_in_a_sentence_and_trains_on(train, tmp_path, what):
    watched = train(folder=str(tmp_path), **REFUSED[what])
    assert [each["is_off"] for each in watched] == [3, 3] and events_in(tmp_path) == []
    assert watched[0]["said"] == [f"gradloc: gradloc does not look into Megatron with {what}. Nothing is watched"]
    assert are_same(watched, train(**REFUSED[what]))
