# SPDX-License-Identifier: Apache-2.0
"""Several ranks: what differs between them, and what ends or fails on one of them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradloc
from gradloc import token_log_probs
from gradloc.loop.driver import AbortedBySpike
from tests.watch.loops import PLANT, TAU, WORTH, T, batches, flat, model_of
from tests.watch.test_harmless import events_in


def run(folder: str, action: str = "observe", uneven: bool = False, failing: bool = False, layout: str = "ddp") -> Any:
    """Four steps with a token planted in the third; what came of them on this rank.

    Args:
        folder: of the run; empty: nothing is watched.
        action: as of ``gradloc.Watch``.
        uneven: the first rank makes its rows in one micro-batch, the other in two.
        failing: the forward raises when the second rank runs it again.
        layout: of the model.
    """
    torch.manual_seed(7)
    model: Any = model_of(layout, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = gradloc.Watch(model, optimizer, folder or ".", action if folder else "off", **TAU)
    rank, trained, ended = dist.get_rank(), 0, ""
    for number, (ids, mask) in enumerate(batches(4), 1):
        weight = torch.ones_like(mask, dtype=torch.float32)
        weight[PLANT] = WORTH if number == 3 else 1.0
        optimizer.zero_grad()
        ids, mask, weight = (each[4 * rank : 4 * rank + 4] for each in (ids, mask, weight))
        parts = torch.arange(4).split(4 if uneven and rank == 0 else 2)
        for index, rows in enumerate(parts):
            x, kept, calls = ids[rows], mask[rows], []

            def forward() -> torch.Tensor:
                calls.append(0)  # noqa: B023 (as people write it)
                if failing and rank == 1 and len(calls) > 1 and number == 3:  # noqa: B023
                    raise RuntimeError("out of memory, say")
                return token_log_probs(model(x[:, :-1], T), x[:, 1:])  # noqa: B023

            model.require_backward_grad_sync = index == len(parts) - 1
            found = watch.log_probs(forward, kept, x[:, 1:])
            (-(found * kept * weight[rows]).sum() / 48).backward()
        try:
            watch.clip_grad_norm_(1.0)
        except AbortedBySpike as error:
            ended = str(error)
            break
        optimizer.step()
        trained += 1
    return {"weights": flat(model), "trained": trained, "ended": ended, "metrics": watch.metrics}


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


def test_a_model_that_no_rank_shares_is_refused(bare_world):
    said = bare_world.run("tests.watch.test_ranks.refused")
    assert all("with 2 processes in DDP or FSDP, found a Decoder" in each for each in said)


def test_gradients_that_are_views_of_ddp_s_buckets_are_refused(bare_world):
    said = bare_world.run("tests.watch.test_ranks.refused", has_views=True)
    assert all("gradient_as_bucket_view must be false" in each for each in said)
