# SPDX-License-Identifier: Apache-2.0
"""Which link broke, in runs with a planted fault; and that looking changes nothing."""

import hashlib
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import gradloc
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.fault import find
from gradloc.fault.reference import Measured, Reference
from gradloc.fault.updates import Updates
from gradloc.search.weights import MovedWeights
from gradloc.trigger import Spike
from lab.benchmarks import links
from lab.experiments.verdict import read_events

SEED = 7
PLAN = links.Plan("gpt", SEED, 32, 2, 2e-3, 0.1, 0.999, 2, 4)
ATTEMPTS = {"lost_moments": 3}
"""Which of links.STRENGTHS makes a spike; the first, where not said."""
LABELS = {"learning_rate": "learning_rate_jumped", "lost_moments": "moments_lost"}
"""Cause of a fault of the last update; the fault's own name, where not said."""


def events(folder: Path, since: int = links.HEALTHY) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["step"]["global_step"] > since]


def trained(steps: int, plan: links.Plan = PLAN, fault: str = "", **given: Any) -> links.Run:
    """Return a run after this many steps."""
    torch.set_num_threads(1)
    made = links.Run(plan, fault, **given)
    for _ in range(steps):
        made.take()
    return made


def state(made: links.Run) -> str:
    """Return the sha256 of a run's weights and of its optimizer's state."""
    moments = [value for each in made.optimizer.state.values() for value in each.values()]
    held = [param.detach() for param in made.model.parameters()] + moments
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in held)).hexdigest()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """``run(fault, steps, **watched)``: what a run with a fault ends with; without a watch too, once for each fault.

    The healthy steps are trained once, and each run continues them in a child process.
    """
    folder = tmp_path_factory.mktemp("healthy")
    watched = trained(links.HEALTHY, folder=str(folder), trigger={"floor": 2.0, "cap": 2.5})
    made = {"watched": watched, "plain": trained(links.HEALTHY)}
    shutil.copytree(folder, before := tmp_path_factory.mktemp("before"), dirs_exist_ok=True)
    unwatched: dict[str, str] = {}

    def continued(kind: str, fault: str, steps: int) -> dict[str, Any]:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("gradloc").addHandler(handler)
        planted = made[kind]
        planted.plant(fault, False, ATTEMPTS.get(fault, 0))
        for _ in range(steps):
            planted.take()
        watch = planted.watch
        return {
            "state": state(planted),
            "parameter": planted.fault.parameter,
            "failures": watch.localizer.num_failures if watch else 0,
            "events": events(folder),
            "heard": heard,
        }

    def call(fault: str, steps: int = 3) -> dict[str, Any]:
        if fault not in unwatched:
            unwatched[fault] = links.in_a_child(lambda: continued("plain", fault, 3))["state"]
        found = links.in_a_child(lambda: continued("watched", fault, steps))
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        return {**found, "state_without_watch": unwatched[fault]}

    return call


@pytest.mark.full
@pytest.mark.parametrize("fault", links.FAULTS)
def test_the_right_link_is_named_and_the_run_is_as_without_a_watch(run, fault):
    found = run(fault)
    assert found["state"] == found["state_without_watch"]
    first, *_ = found["events"]
    truth = links.FAULTS[fault]
    assert first["fault"]["at"] == truth, first["fault"]
    assert first["step"]["global_step"] <= links.HEALTHY + 2
    assert bool(first["culprits"]) == (fault in ("token", "row"))
    if found["parameter"]:
        assert found["parameter"] in first["fault"]["parameters"][:3]
    if truth == "last_update":
        evidence = first["fault"]["evidence"]
        assert max(evidence["norm_without_update"], evidence["norm_under_usual_update"]) < first["trigger"]["threshold"]
        usual = {"learning_rate": PLAN.rate, "weight_decay": PLAN.decay}.get(fault)
        assert evidence.get(f"usual_{fault}") == usual
        assert first["cause"]["label"] == LABELS.get(fault, fault)
        assert first["verdict"].startswith("Not the data: ")


@pytest.mark.full
def test_no_token_is_accused_where_updates_moved_weights_far_that_few_tokens_use(tmp_path):
    """Adam's second moments are smallest for the rows of rare tokens: an ordinary batch is quiet, one with them not."""
    trained(62, links.Plan.of("gpt", 3001), "second_moments", is_gradual=True, folder=str(tmp_path))
    first, *_ = events(tmp_path)
    assert first["fault"]["at"] == "weights" and not first["culprits"], first["fault"]
    assert "tokens.weight" in first["fault"]["parameters"]


@pytest.mark.full
def test_no_token_is_accused_of_a_norm_that_is_not_finite_at_weights_where_any_batch_s_is(tmp_path):
    made = trained(links.HEALTHY - 1, folder=str(tmp_path))
    for rate in (1e15, PLAN.rate):
        for group in made.optimizer.param_groups:
            group["lr"] = rate
        made.take()
    first, *_ = events(tmp_path)
    assert first["trigger"]["kind"] == "non_finite"
    assert first["fault"]["at"] == "last_update" and not first["culprits"], first["fault"]
    assert first["cause"]["label"] == "learning_rate_jumped"


@pytest.mark.parametrize("usual", [0.01, 0.5, 0.95, 1.4])
def test_a_norm_that_is_not_finite_is_the_batch_s_where_an_earlier_one_has_its_own_norm(usual, monkeypatch):
    """However near the earlier step's norm is to the threshold, which is 1."""
    model = torch.nn.Linear(2, 2)
    prober = SimpleNamespace(space=GradientSpace(model), ranks=Ranks(), step=None)
    spike = Spike("non_finite", math.nan, 1.0, None, 8)
    task = SimpleNamespace(prober=prober, spike=spike, reference=1.0, increments=None, can_afford=lambda **_: True)
    monkeypatch.setattr(find, "_run", lambda *_: 1.2 * usual)
    reference = Reference(SimpleNamespace(), 7, usual, 1, ())
    fault, _ = find.find_fault(task, find.Clues(reference, Updates(), number=8))
    assert fault.at == "batch", fault.reason


def found_apart() -> tuple[Any, ...]:
    """Return the evidence of a rank whose norms of earlier steps have other last bits than its peer's."""
    ranks = Ranks()
    usual = 0.5 + ranks.rank * 2.0**-24
    prober = SimpleNamespace(space=GradientSpace(torch.nn.Linear(2, 2)), ranks=ranks, step=None)
    spike = Spike("fixed", 100.0, 1.0, None, 8)
    task = SimpleNamespace(prober=prober, spike=spike, reference=1.0, increments=None, can_afford=lambda **_: True)
    measured = tuple(Measured(usual * times, torch.zeros(()), torch.zeros(())) for times in (3, 1))
    reference = Reference(SimpleNamespace(loss_scale=1.0), 7, usual, 1, measured[ranks.rank :])
    clues = find.Clues(reference, Updates(), 8, factor=200.0, squares=[0.0] * 14 + [0.25, 0.25])
    fault, _ = find.find_fault(task, clues)
    return fault.label, fault.evidence


def test_the_first_rank_s_norms_of_earlier_steps_count(bare_world):
    first, second = bare_world.run("tests.fault.test_links.found_apart")
    assert first == second and first[0] == "gradient_scaled"
    assert (first[1]["usual_norm"], first[1]["usual_factor"]) == (0.5, 1.0)


@pytest.mark.full
def test_mask_skips_a_step_whose_batch_is_not_at_fault(tmp_path):
    given = {"folder": str(tmp_path), "trigger": {"floor": 2.0, "cap": 2.5}, "action": "mask"}
    trained(links.HEALTHY + 1, fault="head_scale", **given)
    first, *_ = events(tmp_path)
    assert first["action"]["taken"] == "skip" and "outside of the optimizer" in first["action"]["reason"]


@pytest.mark.full
@pytest.mark.parametrize(("owner", "name", "call"), [(MovedWeights, "__exit__", 0), (Updates, "before_last", 9)])
def test_a_run_goes_on_as_without_a_watch_after_a_failure(run, owner, name, call):
    """Elsewhere: test_injected.py."""
    real, calls = getattr(owner, name), iter(range(10**6))

    def failing(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            if name == "__exit__":
                real(*given, **more)
            raise RuntimeError("injected")
        return real(*given, **more)

    with mock.patch.object(owner, name, failing):
        found = run("learning_rate")
    assert found["state"] == found["state_without_watch"]
    assert found["failures"] == 1, "it was reached"


@pytest.mark.full
def test_an_early_warning_comes_before_the_norm(run):
    said = [line for line in run("learning_rate", steps=2)["heard"] if "as usual" in line]
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
        ("fsdp2", "second_moments"),
        pytest.param("ddp", "learning_rate", marks=pytest.mark.slow),
        pytest.param("fsdp1", "learning_rate", marks=pytest.mark.slow),
        pytest.param("fsdp2", "weight_decay", marks=pytest.mark.slow),
        pytest.param("fsdp2", "token", marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_and_sharded_weights_come_back(bare_world, tmp_path, layout, fault):
    plain = bare_world.run("tests.fault.ranks.train", layout=layout, fault=fault)
    watched = bare_world.run("tests.fault.ranks.train", layout=layout, fault=fault, folder=str(tmp_path))
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one["weights"], other["weights"])
    first, *_ = events(tmp_path)
    assert first["fault"]["at"] == links.FAULTS[fault], first["fault"]
    assert fault == "token" or "norm_without_update" in first["fault"]["evidence"], "it was undone"
