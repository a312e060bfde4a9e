# SPDX-License-Identifier: Apache-2.0
"""Which link broke, in runs with a planted fault; and that looking changes nothing."""

import functools
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradloc
from gradloc.core.probe import Prober
from gradloc.fault.updates import Updates
from gradloc.search.weights import MovedWeights
from lab.benchmarks import links

SEED = 7
PLAN = links.Plan("gpt", SEED, 32, 2, 2e-3, 0.1, 0.999, 2, 4)
NEVER_SPIKES = ("lost_moments",)


def run(folder: Path | str = "", fault: str = "", steps: int = links.HEALTHY + 3, **given: Any) -> links.Run:
    torch.set_num_threads(1)
    made = links.Run(PLAN, fault, folder=str(folder), trigger={"floor": 2.0, "cap": 2.5}, **given)
    for _ in range(steps):
        made.take()
    return made


def events(folder: Path, since: int = links.HEALTHY) -> list[dict[str, Any]]:
    path = folder / "gradloc" / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in found if event["step"]["global_step"] > since]


@functools.cache
def plain(fault: str) -> list[torch.Tensor]:
    """Return what a run without a watch ends with."""
    return weights(run(fault=fault))


def weights(made: links.Run) -> list[torch.Tensor]:
    moments = [value for state in made.optimizer.state.values() for value in state.values()]
    return [param.detach() for param in made.model.parameters()] + moments


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in links.FAULTS if fault not in NEVER_SPIKES])
def test_the_right_link_is_named_and_the_run_is_as_without_a_watch(tmp_path, fault):
    watched = run(tmp_path, fault)
    assert all(torch.equal(a, b) for a, b in zip(weights(watched), plain(fault), strict=True))
    first, *_ = events(tmp_path)
    truth = links.FAULTS[fault]
    assert first["fault"]["at"] == truth, first["fault"]
    assert first["step"]["global_step"] <= links.HEALTHY + 2
    assert bool(first["culprits"]) == (fault in ("token", "row"))
    if watched.fault.parameter:
        assert watched.fault.parameter in first["fault"]["parameters"][:3]
    if truth == "last_update":
        evidence = first["fault"]["evidence"]
        assert max(evidence["norm_without_update"], evidence["norm_under_usual_update"]) < first["trigger"]["threshold"]
        usual = {"learning_rate": PLAN.rate, "weight_decay": PLAN.decay}.get(fault)
        assert evidence.get(f"usual_{fault}") == usual
        assert first["cause"]["label"] == {"learning_rate": "learning_rate_jumped"}.get(fault, fault)
        assert first["verdict"].startswith("Not the data: ")


@pytest.mark.full
def test_no_token_is_accused_where_updates_moved_weights_far_that_few_tokens_use(tmp_path):
    """Adam's second moments are smallest for the rows of rare tokens: an ordinary batch is quiet, one with them not."""
    torch.set_num_threads(1)
    made = links.Run(links.Plan.of("gpt", 3001), "second_moments", is_gradual=True, folder=str(tmp_path))
    for _ in range(62):
        made.take()
    first, *_ = events(tmp_path)
    assert first["fault"]["at"] == "weights" and not first["culprits"], first["fault"]
    assert "tokens.weight" in first["fault"]["parameters"]


@pytest.mark.full
def test_mask_skips_a_step_whose_batch_is_not_at_fault(tmp_path):
    run(tmp_path, "head_scale", action="mask")
    first, *_ = events(tmp_path)
    assert first["action"]["taken"] == "skip" and "outside of the optimizer" in first["action"]["reason"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (MovedWeights, "__enter__", 0),
        (MovedWeights, "assign", 0),
        (MovedWeights, "__exit__", 0),
        (Updates, "before_last", 0),
        (Updates, "before_last", 9),
        (Updates, "is_undone", 3),
        (Updates, "ratios", 0),
        (Updates, "outside", 0),
        *((Prober, "compute", call) for call in range(4)),
    ],
)
def test_a_failure_anywhere_leaves_the_run_as_it_was(tmp_path, owner, name, call, caplog):
    real, calls = getattr(owner, name), iter(range(10**6))

    def failing(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            if name == "__exit__":
                real(*given, **more)
            raise RuntimeError("injected")
        return real(*given, **more)

    with caplog.at_level(logging.CRITICAL), mock.patch.object(owner, name, failing):
        watched = run(tmp_path, "learning_rate")
    assert next(calls) > call, "it was reached"
    assert all(torch.equal(a, b) for a, b in zip(weights(watched), plain("learning_rate"), strict=True))
    assert watched.watch.localizer.num_failures == 1


@pytest.mark.full
def test_an_early_warning_comes_before_the_norm(tmp_path, caplog):
    run(tmp_path, "learning_rate", links.HEALTHY + 2)
    said = [record.getMessage() for record in caplog.records if "as usual" in record.getMessage()]
    assert said and f"step {links.HEALTHY + 1} moved the parameters" in said[0]


def test_without_an_earlier_step_it_is_said_that_nothing_is_decided(tmp_path):
    torch.manual_seed(0)
    model = links.Gpt(32, 2, 4)
    watch = gradloc.Watch(model, folder=tmp_path, trigger={"tau": 1e-3})
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (2, 9))
    torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    (event,) = events(tmp_path, 0)
    assert event["fault"]["at"] == "undecided" and "to compare with" in event["fault"]["reason"]
    watch.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("ddp", "learning_rate"),
        ("fsdp2", "second_moments"),
        pytest.param("fsdp2", "weight_decay", marks=pytest.mark.slow),
        pytest.param("fsdp2", "token", marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_and_sharded_weights_come_back(world, tmp_path, layout, fault):
    plain = world.run("tests.fault.ranks.train", layout=layout, fault=fault)
    watched = world.run("tests.fault.ranks.train", layout=layout, fault=fault, folder=str(tmp_path))
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one["weights"], other["weights"])
    first, *_ = events(tmp_path)
    assert first["fault"]["at"] == links.FAULTS[fault], first["fault"]
