# SPDX-License-Identifier: Apache-2.0
"""Loops at the edges of what one line can watch: each is right, or one sentence says why not."""

import gc
import math
import os
import weakref
from functools import partial

import pytest
import torch

import gradloc
from gradloc.watch.clips import ClipTap
from tests.toy_model.model import build
from tests.watch import kinds
from tests.watch.loops import SPIKE, TAU, Loop, T, batches
from tests.watch.test_kinds import check_alone, check_event, differing
from tests.world.events import events_in

# ---- clipped before


class Long(kinds.Kind):
    """Enough steps for a threshold that is learned."""

    steps = spike = 16
    settings = {"trigger": {"warmup": 8, "window": 16}}


class ByHand(Long):
    """The loop's own lines clip."""

    def clip(self):
        norm = torch.nn.utils.get_total_norm([param.grad for param in self.model.parameters()])
        for param in self.model.parameters():
            param.grad.mul_(min(1.0, 0.25 / (float(norm) + 1e-6)))
        return norm


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param(Long, marks=pytest.mark.slow), ByHand])
def test_a_norm_that_the_loop_clips_is_seen(kind, tmp_path):
    check_alone(kind, tmp_path)


def test_torch_s_clip_by_a_known_norm_is_seen_with_the_norm_given_by_name():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = torch.nn.utils.get_total_norm([model.weight.grad])
    tap = ClipTap(lambda param: param is model.weight)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=1.0, total_norm=norm)
    tap.close()
    (clip,) = tap.pending
    assert (clip.limit, clip.norm) == (1.0, 5.0) and model.weight.grad.norm() == pytest.approx(1.0, abs=1e-6)


# ---- parts of the loss that pass through no hidden state


@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0])
def test_a_part_of_the_loss_that_passes_by_and_begins_late(size, tmp_path):
    class Decayed(kinds.Kind):
        """A penalty on a weight begins with the spoiled step."""

        off = math.inf  # the part that is not searched is in the bound

        def step(self, ids, weight):
            self.is_late = bool((weight != 1).any())
            super().step(ids, weight)

        def loss(self, ids, weight):
            penalty = self.model.model.layers[1].mlp.up_proj.weight.square().sum()
            return super().loss(ids, weight) + size * self.is_late * penalty

    Decayed(tmp_path, "mask").run()
    (event,) = events_in(tmp_path)
    if event["culprits"]:
        check_event(Decayed, event, "mask", *(Decayed(is_planted=each).run().norms for each in (True, False)))
    else:
        assert "layers.1.mlp.up_proj.weight" in event["certificate"]["reason"] and event["action"]["taken"] == "skip"


def test_a_model_that_says_nothing_and_a_loss_without_labels(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    gradloc.Watch(model, folder=tmp_path, trigger={"warmup": 8, "window": 16})
    for number in range(20):
        ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(number))
        (model(ids).sum() * (1e6 if number == 15 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    (event,) = events_in(tmp_path)
    assert event["step"]["global_step"] == 16 and event["culprits"] == []


# ---- between backward and step


def test_gradients_times_8_and_one_layer_s_times_50(tmp_path):
    class Scaled(kinds.Kind):
        settings = {"trigger": {"tau": 2000.0}}

        def clip(self):
            for name, param in self.model.named_parameters():
                param.grad.mul_(400.0 if name == "model.layers.1.mlp.up_proj.weight" else 8.0)
            return super().clip()

    Scaled(tmp_path, "mask").run()
    (event,) = events_in(tmp_path)
    assert event["culprits"] == [] and event["action"]["taken"] == "skip"
    assert "model.layers.1.mlp.up_proj.weight (50 times)" in event["certificate"]["reason"]


def step_and_clear(optimizer, _):
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_that_steps_inside_of_the_backward_is_said(tmp_path, caplog):
    def train(folder=""):
        torch.manual_seed(0)
        model = build("tiny")
        if folder:
            gradloc.Watch(model, folder=folder, **TAU)
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            param.register_post_accumulate_grad_hook(partial(step_and_clear, optimizer))
        for ids, _ in batches(3):
            model(ids[:, :-1], T).logsumexp(-1).mean().backward()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    assert torch.equal(train(tmp_path), train())
    assert [record.message for record in caplog.records if "inside of the backward" in record.message]
    assert events_in(tmp_path) == []


# ---- ranks


def uneven(folder: str) -> dict:
    """DDP without its own reduction; the second rank has no micro-batch in the second step."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(build("tiny"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank()
    if folder:
        gradloc.Watch(model, folder=folder, trigger={"tau": 1e3})
    for number, (ids, _) in enumerate(batches(4)):
        optimizer.zero_grad()
        with model.no_sync():
            for rows in ids.chunk(2)[rank].split(2) if number != 1 or rank == 0 else ():
                model(rows[:, :-1], T).logsumexp(-1).mean().backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            torch.distributed.all_reduce(param.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"weights": torch.cat([param.detach().flatten() for param in model.parameters()])}


@pytest.mark.full
def test_a_rank_without_a_micro_batch(bare_world, tmp_path):
    own, stock = (bare_world.run("tests.watch.test_edges.uneven", folder=folder) for folder in (str(tmp_path), ""))
    assert torch.equal(own[0]["weights"], stock[0]["weights"])
    assert events_in(tmp_path) == []


# ---- memory


class OfGraph:
    def __call__(self, grad):
        return None


def alive_in(folder="", **settings):
    """How many micro-batches' logits and graphs are alive behind each forward of a loop that keeps its last outputs."""

    class Counted(kinds.Kind):
        def loss(self, ids, weight):
            nonlocal outputs
            outputs = self.model(input_ids=ids[:, :-1])
            logits, hook = outputs.logits, OfGraph()
            logits.register_hook(hook)
            seen.append((weakref.ref(logits), weakref.ref(hook)))
            del hook
            gc.collect()
            alive.append([sum(each() is not None for each in kind) for kind in zip(*seen, strict=True)])
            return kinds.weighted(logits, ids[:, 1:], weight)

    outputs, seen, alive = None, [], []
    Counted.settings = settings
    Counted(folder).run()
    return alive


@pytest.mark.parametrize("keep_gb", [0.25, 0.0])
def test_no_logits_and_no_graph_outlive_their_micro_batch(keep_gb, tmp_path):
    assert alive_in(tmp_path, keep_gb=keep_gb) == alive_in()


# ---- what fails behind the search


class Raising:
    pad_token_id = 0

    def decode(self, ids, **_):
        raise RuntimeError("out of range")


class Surrogate:
    pad_token_id = 0

    def decode(self, ids, **_):
        return "a\ud800"


@pytest.mark.parametrize("tokenizer", [Raising(), Surrogate()])
def test_a_tokenizer_s_fault_costs_no_event(tokenizer, tmp_path):
    class Decoded(kinds.Kind):
        settings = {"tokenizer": tokenizer}

    check_alone(Decoded, tmp_path)


def test_a_run_s_folder_whose_name_is_no_text(tmp_path):
    check_alone(kinds.Kind, tmp_path / os.fsdecode(b"run\xff"))


def test_a_record_that_fails_says_what_became_of_the_step(tmp_path, monkeypatch, caplog):
    def fail(context):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("gradloc.loop.localizer.raw_event", fail)
    masked, without = kinds.Kind(tmp_path, "mask").run(), kinds.Kind(is_planted=False).run().result()
    assert events_in(tmp_path) == [] and not differing([masked.result()], [without], "weights")
    assert masked.watch.localizer.num_failures == 1
    assert "the step was decided before (mask), and its event is lost" in caplog.text
    assert "with the gradient it had" not in caplog.text


@pytest.mark.parametrize("at", ["search", "mask"])
def test_ctrl_c_inside_of_a_search_leaves_the_gradient_whole(at, tmp_path, monkeypatch):
    class Stopped(Loop):
        def take_step(self):
            before = [param.grad.clone() for param in self.model.parameters()]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            clipped = [param.grad.clone() for param in self.model.parameters()]
            try:
                self.optimizer.step()
            except KeyboardInterrupt:
                now = [param.grad for param in self.model.parameters()]
                found.append(all(map(torch.equal, now, clipped)) and not all(map(torch.equal, now, before)))
                raise

    def stop(*_, **__):
        raise KeyboardInterrupt

    found = []
    made = Stopped(tmp_path, "mask")
    real = torch.autograd.backward
    if at == "mask":
        acted = type(made.watch.localizer)._act

        def act(self, *given):
            monkeypatch.setattr(torch.autograd, "backward", stop)
            return acted(self, *given)

        monkeypatch.setattr(type(made.watch.localizer), "_act", act)
    else:
        monkeypatch.setattr("gradloc.core.certificate.Removal.certify", stop)
    with pytest.raises(KeyboardInterrupt):
        made.run(steps=SPIKE)
    assert found == [True]
    monkeypatch.undo()
    assert torch.autograd.backward is real
    made.run(steps=1)  # and goes on


# ---- models that are called in another way


def run_small(tmp_path, model, loss_of):
    """Train a small model for three steps under a watch. ``loss_of`` is called with the step's number, from 1."""
    torch.manual_seed(3)
    gradloc.Watch(model, None, tmp_path, **TAU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in (1, 2, 3):
        optimizer.zero_grad()
        loss_of(number).backward()
        optimizer.step()


def small():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def test_a_forward_of_torch_func_s_transforms_is_not_followed_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gradloc.watch.watch._EARLY", 3)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = gradloc.Watch(model, optimizer, tmp_path)

    def loss(params, x):
        return torch.func.functional_call(model, params, (x[None],)).square().sum()

    for _ in range(3):
        params = {name: param.detach() for name, param in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, torch.ones(4, 6))
        for name, param in model.named_parameters():
            param.grad = each[name].mean(0)
        optimizer.step()
    (said,) = [line.getMessage() for line in caplog.records if line.name.startswith("gradloc")]
    assert "nothing could be watched in 3 optimizer steps" in said and "torch.func" in said
    assert watch.tap.num_seen == 0


def test_a_policy_that_is_called_with_one_state_at_a_time(tmp_path):
    model = small()

    def loss_of(number):
        returns = torch.ones(5)
        if number == 3:
            returns[2] = 1e5
        log_probs = [model(torch.randn(6)).log_softmax(-1)[1] for _ in range(5)]
        return -(torch.stack(log_probs) * returns).sum()

    run_small(tmp_path, model, loss_of)
    (event,) = events_in(tmp_path)
    assert [(each["row"], each["positions"]) for each in event["culprits"]] == [(2, [0])]
    assert event["certificate"]["verdict"] == "explained"


def test_an_optimizer_that_is_made_anew_is_followed_and_one_of_other_parameters_is_not(tmp_path):
    model = small()
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    second = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    watch = gradloc.Watch(model, first, tmp_path)

    def step(*optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(3):
        step(first, second)
    step(second)
    step(second)
    assert watch.optimizer is first
    anew = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(anew)
    assert watch.optimizer is anew and watch.localizer.updates.optimizer is anew


_BALANCE: list[torch.Tensor] = []


class Routed(torch.nn.Module):
    """Leaves a balancing loss in a list outside of the model."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = (torch.nn.Linear(6, width) for width in (6, 2, 3))
        self.further = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        h = self.first(x).tanh()
        gates = self.gate(h).softmax(-1)
        _BALANCE.append(gates.mean(0).square().sum())
        h = h * gates[:, :1]
        for part in self.further:
            h = h + part(h).tanh()
        return self.last(h)


@pytest.mark.parametrize(("is_clipped", "is_counted"), [(False, True), (True, True), (True, False)])
def test_a_part_of_the_loss_that_no_tap_sees_is_no_gradient_that_was_changed(tmp_path, is_clipped, is_counted):
    torch.manual_seed(7)
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradloc.Watch(model, optimizer, tmp_path, **TAU)
    for number in range(1, 5):
        _BALANCE.clear()
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean() + (1e7 if number == 3 else 1e-3) * sum(_BALANCE)
        loss.backward()
        if number == 4:
            grad = model.first.weight.grad
            (grad if is_counted else grad.data).mul_(1e6)  # torch counts no write to .data
        if is_clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.param_groups[0]["lr"] = 1e-9
        optimizer.step()
    passed_by, changed = events_in(tmp_path)
    assert passed_by["fault"]["at"] == "undecided" and passed_by["culprits"] == []
    assert "a part of the loss passes by" in passed_by["fault"]["reason"]
    assert changed["fault"]["at"] == "after_backward" and changed["fault"]["parameters"] == ["first.weight"]


@pytest.mark.parametrize("clears_late", [False, True])
def test_a_gradient_penalty_s_own_backward_is_no_part_of_the_step(tmp_path, clears_late):
    critic = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, 1))

    def loss_of(number):
        real, fake, mixed = (torch.randn(8, 6) for _ in range(3))
        if number == 3:
            real[5] *= 1e4
        scores = critic(mixed.requires_grad_())
        (slope,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
        if clears_late:
            critic.zero_grad()
        return critic(fake).mean() - critic(real).mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    run_small(tmp_path, critic, loss_of)
    (event,) = events_in(tmp_path)
    assert [(each["row"], each["positions"]) for each in event["culprits"]] == [(13, [0])]  # behind the 8 of fake
    assert event["certificate"]["verdict"] == "explained"


class SpoiledBalance(kinds.KeptBalance):
    """A kept balancing loss weighs far too much in the last micro-batch."""

    def loss(self, ids, weight):
        times = 1e5 if (weight == kinds.WORTH).any() else 1.0
        return super().loss(ids, weight.clamp(max=1.0)) + times * self.balance()


def test_no_token_is_accused_of_a_balancing_loss(tmp_path):
    SpoiledBalance(folder=tmp_path).run()
    (event,) = events_in(tmp_path)
    assert event["culprits"] == [] and event["cause"]["label"] == "not_tokens"
    assert "router.weight" in event["cause"]["names"][:3]


def test_a_loss_of_the_model_s_derivative_is_said_to_pass_by(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss_of(number):
        x, weight = torch.rand(8, 2, requires_grad=True), torch.ones(8, 1)
        if number == 3:
            weight[2] = 1e5
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (((slope[:, :1] + u * slope[:, 1:]) ** 2 + u**2) * weight).mean()

    run_small(tmp_path, model, loss_of)
    (event,) = events_in(tmp_path)
    assert event["culprits"] == [] and event["fault"]["at"] == "undecided"


def test_measuring_the_norm_changes_no_gradient_that_is_infinite(tmp_path):
    model = torch.nn.Linear(4, 2)
    watch = gradloc.Watch(model, torch.optim.SGD(model.parameters(), 0.1), str(tmp_path))
    model(torch.ones(3, 4)).sum().backward()
    model.weight.grad[0, 0] = torch.inf
    before = [param.grad.clone() for param in model.parameters()]
    assert watch.clip_grad_norm_() == torch.inf
    assert all(map(torch.equal, before, (param.grad for param in model.parameters())))
