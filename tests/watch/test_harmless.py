# SPDX-License-Identifier: Apache-2.0
"""``observe`` is the loop without a watch, and ``mask`` the loop with that token's weight at zero, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.watch import loops
from tests.world import World
from tests.world.events import events_in

MORE = [("ddp", "bfloat16"), ("ddp", "float16"), ("fsdp2", "float32"), ("fsdp2", "float16")]
MORE += [(f"{layout}-once", "float32") for layout in ("ddp", "fsdp2", "fsdp1")]


def named(event: dict[str, Any]) -> list[tuple[int, int]]:
    """Row and position of every token that is named."""
    return [(culprit["row"], position) for culprit in event["culprits"] for position in culprit["positions"]]


def check(run: Any, tmp_path: Path, **case: Any) -> None:
    stock, without = run(**case), run(worth=0.0, **case)
    observed = run(folder=str(tmp_path / "observe"), **case)
    masked = run(folder=str(tmp_path / "mask"), action="mask", **case)
    for rank in range(len(stock)):
        assert observed[rank]["norms"] == stock[rank]["norms"]
        assert torch.equal(observed[rank]["weights"], stock[rank]["weights"])
        assert masked[rank]["norms"] == without[rank]["norms"]
        assert torch.equal(masked[rank]["weights"], without[rank]["weights"])
        assert not torch.equal(masked[rank]["weights"], stock[rank]["weights"]), "the plant mattered"
    for name in ("observe", "mask"):
        (event,) = events_in(tmp_path / name)
        assert named(event) == [loops.PLANT] and event["certificate"]["verdict"] == "explained"
        assert event["step"]["global_step"] == loops.SPIKE and event["action"]["taken"] == name


def alone(**given: Any) -> list[dict[str, Any]]:
    return [loops.train(**given)]


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
def test_in_one_process(tmp_path, precision):
    check(alone, tmp_path, precision=precision)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("ddp", "float32"),
        ("fsdp2", "bfloat16"),
        ("fsdp1", "float32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_on_two_ranks(bare_world: World, tmp_path, layout, precision):
    def run(**given: Any) -> list[dict[str, Any]]:
        return bare_world.run("tests.watch.loops.train", **given)

    check(run, tmp_path, layout=layout, precision=precision)
