# SPDX-License-Identifier: Apache-2.0
"""Several ranks: what differs between them, and what ends or fails on one of them."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradloc
from gradloc.loop.driver import AbortedBySpike
from gradloc.record.store import EventStore
from gradloc.watch.clips import ClipTap
from tests.watch.loops import SPIKE, Loop, flat, model_of
from tests.world.events import events_in


class Failing(Loop):
    """The model raises when the second rank runs the spoiled step again."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.model.register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        is_again = self.watch.tap.is_again
        if is_again and self.rank == 1 and self.watch.number == SPIKE:
            raise RuntimeError("out of memory, say")


def run(
    folder: str, action: str = "observe", uneven: bool = False, failing: bool = False, late_s: float = 0.0
) -> dict[str, Any]:
    """What came of four steps on this rank; ``uneven``: the first rank makes its rows in one micro-batch; ``late_s``:
    seconds that the folder's disk takes."""
    write = EventStore.write_folder
    with mock.patch.object(EventStore, "write_folder", lambda *given: (time.sleep(late_s), write(*given))[1]):
        return _run(folder, action, uneven, failing)


def _run(folder: str, action: str, uneven: bool, failing: bool) -> dict[str, Any]:
    made, ended = (Failing if failing else Loop)(folder, action, "ddp-once"), ""
    try:
        made.run(each=4 if uneven and made.rank == 0 else 2)
    except AbortedBySpike as error:
        ended = f"{error} {len(events_in(Path(folder)))} events on disk"
    return {"weights": flat(made.model), "trained": len(made.norms), "ended": ended, "metrics": made.watch.metrics}


def on(world: Any, folder: Path | str = "", **given: Any) -> list[dict[str, Any]]:
    return world.run("tests.watch.test_ranks.run", folder=str(folder), **given)


def test_a_step_whose_ranks_ran_different_numbers_is_left_alone(bare_world, tmp_path):
    watched, stock = on(bare_world, tmp_path, action="mask", uneven=True), on(bare_world, uneven=True)
    assert [each["trained"] for each in watched] == [4, 4] and events_in(tmp_path) == []
    assert torch.equal(watched[0]["weights"], stock[0]["weights"])


def with_norms(folder: str, norms: list[float | None]) -> int:
    """Return the number of failures where each rank has another norm of the spoiled step; None: its own."""
    made, given, own = Loop(folder, "observe", "ddp-once"), norms[torch.distributed.get_rank()], ClipTap.norm

    def norm(self: ClipTap, *arguments: Any) -> torch.Tensor:
        known = own(self, *arguments)
        return known if given is None or made.watch.number != SPIKE - 1 else torch.tensor(given)

    with mock.patch.object(ClipTap, "norm", norm):
        made.run()
    return made.watch.localizer.num_failures


@pytest.mark.parametrize(("norms", "num_events"), [([None, 1.0], 1), ([1.0, None], 0)])
def test_the_first_rank_s_norm_decides_for_all(bare_world, tmp_path, norms, num_events):
    assert bare_world.run("tests.watch.test_ranks.with_norms", folder=str(tmp_path), norms=norms) == [0, 0]
    assert len(events_in(tmp_path)) == num_events


class Skipping(Loop):
    """The second rank leaves out its optimizer's step before the spike."""

    def take_step(self) -> None:
        if self.rank == 1 and len(self.norms) == SPIKE - 2:
            self.norms.append(float(self.watch.clip_grad_norm_(1.0)))
        else:
            super().take_step()


def skipping(folder: str) -> torch.Tensor:
    """Return this rank's weights after ten updates."""
    return flat(Skipping(folder, layout="ddp-once").run(steps=10).model)


def test_ten_updates_of_which_one_rank_skips_one(bare_world, tmp_path):
    watched = bare_world.run("tests.watch.test_ranks.skipping", folder=str(tmp_path))
    stock = bare_world.run("tests.watch.test_ranks.skipping", folder="")
    assert all(torch.equal(one, other) for one, other in zip(watched, stock, strict=True))
    assert not torch.equal(*watched), "replicas differ"
    (event,) = events_in(tmp_path)
    assert event["cause"]["label"] == "replicas_differ" and not event["culprits"]


def test_abort_reaches_every_rank_before_the_step_and_behind_the_event_on_disk(bare_world, tmp_path):
    first, second = on(bare_world, tmp_path, action="abort", late_s=6.0)
    assert first["trained"] == second["trained"] == 2
    assert "(action=abort). One token made the step-3 spike" in first["ended"] and "first process" in second["ended"]
    assert second["ended"].endswith("1 events on disk"), "a launcher would end the first process, which writes it"


def test_a_search_that_fails_on_one_rank_leaves_the_step_as_it_was(bare_world, tmp_path):
    watched, stock = on(bare_world, tmp_path, action="mask", failing=True), on(bare_world)
    assert all(torch.equal(each["weights"], stock[0]["weights"]) for each in watched)
    assert watched[0]["metrics"]["gradloc/failures"] == 1 and events_in(tmp_path) == []


class Drifting(torch.nn.Module):
    """Shifts what it is given by a buffer that each rank's rows move, and that DDP broadcasts before a forward."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, *given: Any) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(given[0].float().mean() / 10_000)
        return self.inner(*given) * (1 + self.mean)


class FailingOnce(Failing):
    """The second pass of the search over a micro-batch fails on the second rank, before its forward."""

    num_again = 0

    def fail(self, *given: Any) -> None:
        self.num_again += self.watch.tap.is_again and torch.is_grad_enabled()
        if self.num_again == 2:
            super().fail(*given)


def drifting(folder: str, kind: str) -> torch.Tensor:
    """Return weights and buffer after six steps of which the second spikes."""
    model = torch.nn.parallel.DistributedDataParallel(Drifting(model_of("plain")))
    loop = {"watched": Loop, "failing": FailingOnce}[kind] if folder else Loop
    made = loop(folder, model=model, layout="ddp-once").run(steps=6)
    assert not folder or made.watch.localizer.num_failures == (kind == "failing")
    return torch.cat([flat(made.model), model.module.mean.detach()[None].to(flat(made.model))])


@pytest.mark.parametrize("kind", ["watched", "failing"])
def test_after_a_search_ddp_broadcasts_buffers_as_before(bare_world, tmp_path, kind):
    given = {"kind": kind, "timeout_s": 120}
    watched = bare_world.run("tests.watch.test_ranks.drifting", folder=str(tmp_path), **given)
    stock = bare_world.run("tests.watch.test_ranks.drifting", folder="", **given)
    assert len(events_in(tmp_path)) == (kind == "watched")
    assert torch.equal(watched[0], stock[0]) and torch.equal(watched[1], stock[1])


def refused() -> str:
    model = torch.nn.parallel.DistributedDataParallel(model_of("plain"), gradient_as_bucket_view=True)
    gradloc.Watch(model, torch.optim.SGD(model.parameters(), lr=1.0), ".", "off")
    try:
        gradloc.Watch(model, torch.optim.SGD(model.parameters(), lr=1.0), ".")
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_whose_gradients_are_views_is_refused(bare_world):
    assert all(
        "gradient_as_bucket_view must be false" in each for each in bare_world.run("tests.watch.test_ranks.refused")
    )


def unshared(folder: str) -> dict[str, Any]:
    """Steps of a model that each process has for itself."""
    made = Loop(folder, model=model_of("plain"), layout="ddp").run()
    return {"trained": len(made.norms), "is_off": made.watch.localizer.num_failures}


def test_a_model_that_no_rank_shares_is_not_watched(bare_world, tmp_path):
    for each in bare_world.run("tests.watch.test_ranks.unshared", folder=str(tmp_path)):
        assert each == {"trained": 4, "is_off": 3}
    assert events_in(tmp_path) == []
