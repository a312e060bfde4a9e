# SPDX-License-Identifier: Apache-2.0
"""Several ranks: what differs between them, and what ends or fails on one of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gradloc
from gradloc.loop.driver import AbortedBySpike
from tests.watch.loops import SPIKE, TAU, Loop, flat, model_of
from tests.watch.test_harmless import events_in


class Failing(Loop):
    """The forward raises when the second rank runs the spoiled step again."""

    def forward(self, x):
        is_again = self.watch.number > len(self.norms)
        if is_again and self.rank == 1 and self.watch.number == SPIKE:
            raise RuntimeError("out of memory, say")
        return super().forward(x)


def run(folder: str, action: str = "observe", uneven: bool = False, failing: bool = False) -> dict[str, Any]:
    """What came of four steps on this rank; ``uneven``: the first rank makes its rows in one micro-batch."""
    made, ended = (Failing if failing else Loop)(folder, action, "ddp-once", **TAU), ""
    try:
        made.run(each=4 if uneven and made.rank == 0 else 2)
    except AbortedBySpike as error:
        ended = str(error)
    return {"weights": flat(made.model), "trained": len(made.norms), "ended": ended, "metrics": made.watch.metrics}


def on(world: Any, folder: Path | str = "", **given: Any) -> list[dict[str, Any]]:
    return world.run("tests.watch.test_ranks.run", folder=str(folder), **given)


def test_a_step_whose_ranks_ran_different_numbers_is_left_alone(bare_world, tmp_path):
    watched, stock = on(bare_world, tmp_path, action="mask", uneven=True), on(bare_world, uneven=True)
    assert [each["trained"] for each in watched] == [4, 4] and events_in(tmp_path) == []
    assert torch.equal(watched[0]["weights"], stock[0]["weights"])


def test_abort_reaches_every_rank_before_the_step(bare_world, tmp_path):
    first, second = on(bare_world, tmp_path, action="abort")
    assert first["trained"] == second["trained"] == 2
    assert "(action=abort). One token made the step-3 spike" in first["ended"] and "first process" in second["ended"]


def test_a_search_that_fails_on_one_rank_leaves_the_step_as_it_was(bare_world, tmp_path):
    watched, stock = on(bare_world, tmp_path, action="mask", failing=True), on(bare_world)
    assert all(torch.equal(each["weights"], stock[0]["weights"]) for each in watched)
    assert watched[0]["metrics"]["gradloc/failures"] == 1 and events_in(tmp_path) == []


def refused(has_views: bool = False) -> str:
    model = model_of("plain")
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if has_views else model
    gradloc.Watch(model, torch.optim.SGD(model.parameters(), lr=1.0), ".", "off")
    try:
        gradloc.Watch(model, torch.optim.SGD(model.parameters(), lr=1.0), ".")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("has_views", "said"),
    [(False, "with 2 processes in DDP or FSDP, found a Decoder"), (True, "gradient_as_bucket_view must be false")],
)
def test_a_model_that_no_rank_shares_or_whose_gradients_are_views_is_refused(bare_world, has_views, said):
    assert all(said in each for each in bare_world.run("tests.watch.test_ranks.refused", has_views=has_views))
