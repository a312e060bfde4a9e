# SPDX-License-Identifier: Apache-2.0
"""With the one line ``gradloc.Watch(model, folder=...)`` each kind of loop trains on as it did.

Under ``observe`` weights, norms and random state are those of the run without a watch, bit for bit; under ``mask`` the
weights are those of the run in which the token has no loss. The event names that token alone, and explains the spike.
"""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradloc.watch.taps import ModelTap
from tests.watch import kinds
from tests.world import World
from tests.world.events import events_in, named

OF_ALL = [each for each in vars(kinds).values() if isinstance(each, type) and issubclass(each, kinds.Kind)]
RANKED = [each for each in OF_ALL if issubclass(each, kinds.Ranked) and each is not kinds.Ranked]
ALONE = [each for each in OF_ALL if not issubclass(each, kinds.Ranked)]
SLOW = {kinds.CompiledOutside, kinds.CompiledInside, kinds.CompiledLayers, kinds.LightningByValue}
SLOW |= {kinds.RecomputedReentrant, kinds.StockWeighted, kinds.Replicated, kinds.CompiledOwn, kinds.ShardedHead}
SLOW |= {kinds.Pretrained, kinds.ShardedOffloaded, kinds.ShardedOnce, kinds.ShardedFlatOnce}
pytestmark = pytest.mark.full


def table(found: list[Any]) -> Any:
    marked = [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else (), id=kind.__name__) for kind in found]
    return pytest.mark.parametrize("kind", marked)


@table(ALONE)
def test_a_kind(kind, tmp_path):
    check_alone(kind, tmp_path)


@table(RANKED)
def test_a_kind_on_two_ranks(bare_world: World, kind, tmp_path):
    check(kind, lambda **given: bare_world.run("tests.watch.kinds.on_ranks", name=kind.__name__, **given), tmp_path)


def check_alone(kind: Any, tmp_path: Path) -> None:
    check(kind, lambda **given: [kind(**given).run().result()], tmp_path)


def check(kind: Any, run: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    for name in kind.needs:
        pytest.importorskip(name, exc_type=ImportError)
    stock, without = run(), run(is_planted=False)
    assert differing(stock, without, "weights"), "the plant matters"
    observed = run(folder=str(tmp_path / "observe"))
    assert [each["norms"] for each in observed] == [each["norms"] for each in stock]
    assert not differing(observed, stock, "weights") and not differing(observed, stock, "state")
    masked = run(folder=str(tmp_path / "mask"), action="mask")
    if kind.is_searched:
        wanted = without if kind.num_events else stock
        off = differing(masked, wanted, "weights")
        assert not off if kind.is_exact else max(off.values(), default=0.0) <= kind.close, off
        assert not differing(masked, wanted, "state")
        assert not kind.norms_are_taken or [each["norms"] for each in masked] == [each["norms"] for each in wanted]
    for name in ("observe", "mask"):
        events = events_in(tmp_path / name)
        assert len(events) == kind.num_events
        for event in events:
            check_event(kind, event, name, stock[0]["norms"], without[0]["norms"])


def check_event(kind: Any, event: dict[str, Any], action: str, norms: list[float], without: list[float]) -> None:
    """Hold an event against the steps' norms with the planted token, and without it."""
    certificate, taken, step = event["certificate"], event["action"]["taken"], event["step"]["global_step"] - 1
    assert named(event) == kind.named
    if kind.has_norm and norms:
        assert event["trigger"]["grad_norm"] == pytest.approx(norms[step], rel=kind.off)
    if not kind.is_searched:
        assert "was not searched" in f"{certificate['reason']} {event['action']['reason']}"
        assert certificate["verdict"] != "explained" and taken == ("skip" if action == "mask" else action)
        return
    assert certificate["verdict"] == "explained" and taken == action
    if kind.has_norm and norms:
        most = min(certificate["error_bound"], kind.off * without[step])
        assert abs(certificate["norm_after"] - without[step]) <= most + 1e-6 * without[step]


def differing(ours: list[dict[str, Any]], other: list[dict[str, Any]], part: str) -> dict[str, float]:
    """Return by how much values of any rank differ, by name; nothing of those that are equal bit for bit."""
    found = {}
    for rank, (mine, theirs) in enumerate(zip(ours, other, strict=True)):
        for name, value in mine[part].items():
            if not torch.equal(value, theirs[part][name]):
                found[f"{name} of rank {rank}"] = float((value.double() - theirs[part][name].double()).abs().max())
    return found


@pytest.mark.parametrize(
    "hook", ["_begin", "_after_body", "_before_head", "_after_head", "_keep_hidden_grad", "_keep_head_grad"]
)
def test_a_hook_of_ours_that_fails_leaves_the_loop_as_it_is(tmp_path, monkeypatch, caplog, hook):
    stock, calls = kinds.Kind().run().result(), []

    def failing(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return works(self, *given)

    works = getattr(ModelTap, hook)
    monkeypatch.setattr(ModelTap, hook, failing)
    with caplog.at_level(logging.ERROR):
        watched = kinds.Kind(tmp_path, "mask").run().result()
    assert len(calls) == 2 and not differing([watched], [stock], "weights") and not events_in(tmp_path)
    said = [each.getMessage() for each in caplog.records if each.name.startswith("gradloc")]
    assert said == ["gradloc: watching failed (RuntimeError: planted), so it is off; training goes on"]


@pytest.mark.parametrize("kind", [kinds.RecomputedWholeReentrant, kinds.OneGraphInside])
def test_a_model_that_shows_no_hidden_state_is_said(tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr("gradloc.watch.watch._EARLY", kinds.STEPS)
    kind(tmp_path).run()
    assert f"nothing could be watched in {kinds.STEPS} optimizer steps" in caplog.text


def test_a_model_s_copy_or_file_is_not_watched_and_both_are_freed(tmp_path):
    made = kinds.OfOwn(tmp_path)
    ids = torch.ones(1, 4, dtype=torch.long)
    torch.save(made.model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(made.model), torch.load(tmp_path / "model.pt", weights_only=False)):
        copied(ids).sum().backward()
    assert made.watch.tap.num_seen == 0
    alive = weakref.ref(made.model), weakref.ref(made.watch)
    del made
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_part_of_the_loss_that_passes_by_is_no_gradient_that_was_changed(tmp_path):
    class TwoStates(kinds.OfOwn):
        class made(kinds.Own):
            def begin(self):
                self.second = torch.nn.Linear(kinds.H, kinds.VOCABULARY)

            def forward(self, ids):
                hidden = self.hidden(ids)
                self.other = self.second(self.last(hidden))
                return self.head(hidden)

        def loss(self, ids, weight):
            loss = super().loss(ids, weight)
            return loss + self.model.other.square().mean() * weight.max() / 10

    TwoStates(tmp_path).run()
    (event,) = events_in(tmp_path)
    assert event["fault"]["at"] == "undecided" and event["culprits"] == []
    assert "the loss also uses second." in event["fault"]["reason"]


@pytest.mark.parametrize("action", ["observe", "mask"])
def test_a_gradient_that_the_loop_always_changes_a_little_is_searched_and_not_masked(tmp_path, action):
    class Centred(kinds.OfOwn):
        def take_step(self):
            self.model.first.weight.grad.sub_(self.model.first.weight.grad.mean(0, keepdim=True))
            super().take_step()

    stock = Centred().run().result()
    watched = Centred(tmp_path, action).run().result()
    (event,) = events_in(tmp_path)
    assert event["fault"]["at"] == "batch" and named(event) == [kinds.PLANT]
    assert "in 1 parameter: first.weight" in event["certificate"]["reason"]
    if action == "observe":
        assert not differing([watched], [stock], "weights")
    else:
        assert event["action"]["taken"] == "skip" and "masking is not possible" in event["action"]["reason"]


def test_a_loop_s_own_adaptive_clip_hides_no_spike(tmp_path):
    class Adaptive(kinds.OfOwn):
        def take_step(self):
            for param in self.model.parameters():
                param.grad.mul_((0.01 * param.detach().norm() / param.grad.norm()).clamp(max=1.0))
            self.optimizer.step()
            self.optimizer.zero_grad()

    stock = Adaptive().run().result()
    watched = Adaptive(tmp_path / "observe").run().result()
    assert not differing([watched], [stock], "weights")
    Adaptive(tmp_path / "mask", "mask").run()
    for name in ("observe", "mask"):
        (event,) = events_in(tmp_path / name)
        assert named(event) == [kinds.PLANT] and event["fault"]["at"] == "batch"
    assert (
        event["action"]["taken"] == "skip" and "the loop's own code changed the gradient" in event["action"]["reason"]
    )


def test_a_gradient_that_was_raised_once_makes_no_later_step_a_spike(tmp_path):
    class Raised(kinds.OfOwn):
        def take_step(self):
            if len(self.norms) == 1:
                self.model.first.weight.grad.mul_(1e4)
            self.norms.append(0.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    Raised(tmp_path, is_planted=False).run()
    (event,) = events_in(tmp_path)
    assert event["step"]["global_step"] == 2 and event["fault"]["at"] == "after_backward"


def test_weights_that_move_between_backward_and_step_are_no_gradient_that_was_changed(tmp_path):
    class SharpnessAware(kinds.OfOwn):
        def step(self, ids, weight):
            self.loss(ids, weight).backward()
            own = [param.detach().clone() for param in self.model.parameters()]
            with torch.no_grad():
                for param in self.model.parameters():
                    param.add_(0.5 * param.grad / param.grad.norm())
            self.optimizer.zero_grad()
            self.loss(ids, weight).backward()
            for param, before in zip(self.model.parameters(), own, strict=True):
                param.data = before
            self.take_step()

    SharpnessAware(tmp_path).run()
    (event,) = events_in(tmp_path)
    assert event["fault"]["at"] == "undecided" and event["culprits"] == []
    assert "moved weights between backward and step" in event["fault"]["reason"]


def test_an_optimizer_that_takes_gradients_for_granted_skips_a_step(tmp_path):
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad.sign(), alpha=group["lr"])

    class Skipping(kinds.OfOwn):
        def build_optimizer(self):
            return Signs(self.model.parameters(), {"lr": 1e-3})

    class WithoutThatStep(Skipping):
        def step(self, ids, weight):
            if float(weight.max()) > 1:
                self.loss(ids, weight)
            else:
                super().step(ids, weight)

    watched = Skipping(tmp_path, "skip").run().result()
    assert not differing([watched], [WithoutThatStep().run().result()], "weights")


def test_a_parameter_outside_of_the_forward_that_made_the_spike_hides_no_token(tmp_path):
    class Uncertain(kinds.OfOwn):
        class made(kinds.Own):  # noqa: N801
            def begin(self):
                self.log_variance = torch.nn.Parameter(torch.zeros(()))

        def loss(self, ids, weight):
            own, times = self.model.log_variance, 1e8 if weight.max() > 1 else 1e-3
            return super().loss(ids, weight) * (1 - times * (own - own.detach()))

    Uncertain(tmp_path).run()
    (event,) = events_in(tmp_path)
    assert named(event) == [kinds.PLANT] and event["certificate"]["verdict"] == "undecided"
    assert "the gradient of log_variance" in event["certificate"]["reason"]


def test_sparse_gradients_are_refused_with_a_sentence(tmp_path, caplog):
    class Sparse(kinds.OfOwn):
        def build(self):
            model = super().build()
            model.embed = torch.nn.Embedding(kinds.VOCABULARY, kinds.H, sparse=True)
            return model

        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=1e-2)

        def take_step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

    stock, watched = Sparse().run().result(), Sparse(tmp_path).run().result()
    assert not differing([watched], [stock], "weights") and not events_in(tmp_path)
    assert "embed has sparse gradients: make it sparse=False. Nothing is watched" in caplog.text
