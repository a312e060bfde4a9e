# SPDX-License-Identifier: Apache-2.0
"""What a loop may do beside the plain thing: each does what one expects, or says one sentence."""

import copy
import json
import math

import pytest
import torch

import gradloc
from gradloc import token_log_probs
from gradloc.watch.forwarded import frozen
from tests.toy_model.model import build
from tests.watch.loops import PLANT, SPIKE, WORTH, Loop, T, batches, flat
from tests.watch.test_kinds import check_alone
from tests.world import DEVICE
from tests.world.events import events_in, named


def test_a_culprit_has_its_answer_s_reward(tmp_path):
    class Rewarded(Loop):
        def micro_batch(self, x, mask, weight):
            (-(self.log_probs(x, mask, rewards=x[:, 0].float()) * mask * weight).sum() / 96).backward()

    check_alone(Rewarded, tmp_path)
    (event,) = events_in(tmp_path / "observe")
    ids = [ids for ids, _ in batches(SPIKE)][-1]
    assert event["culprits"][0]["reward"] == float(ids[PLANT[0], 0])


class Varying(Loop):
    """As many micro-batches as the batch takes."""

    def step(self, ids, mask, weight):
        super().step(ids, mask, weight, each=2 + len(self.norms) % 3)  # 4, 3, 2, 4: the last may be short


class Ungraphed(Loop):
    """A clip without a graph."""

    @torch.no_grad()
    def take_step(self):
        super().take_step()


class Evaluating(Loop):
    """Evaluation in between, and what has no graph or no backward."""

    def micro_batch(self, x, mask, weight):
        with torch.no_grad():
            self.log_probs(x, mask)
        self.watch.log_probs(lambda: torch.zeros(mask.shape), mask, x[:, 1:])
        self.log_probs(x.flip(0), mask)
        super().micro_batch(x, mask, weight)


class Failing(Loop):
    """An exception between the calls; what was recorded is dropped where ``zero_grad`` drops the gradient."""

    def step(self, ids, mask, weight, each=2):
        try:
            self.optimizer.zero_grad()
            self.micro_batch(ids[:2], mask[:2], weight[:2])
            self.log_probs(ids[:, :0], mask)
        except (IndexError, RuntimeError):
            pass
        super().step(ids, mask, weight, each)


class Dropping(Loop):
    """A spoiled micro-batch comes first and is dropped by the model; the planted one comes later."""

    is_set_to_none = True

    def step(self, ids, mask, weight, each=2):
        self.optimizer.zero_grad()
        self.micro_batch(ids[:2], mask[:2], 50 * weight[:2])
        self.model.zero_grad(set_to_none=self.is_set_to_none)
        self.micro_batches(ids, mask, weight, each)
        self.take_step()


class Late(Loop):
    """``zero_grad`` between forward and backward, of a single micro-batch."""

    def step(self, ids, mask, weight):
        loss = -(self.log_probs(ids, mask) * mask * weight).sum() / 96
        self.optimizer.zero_grad()
        loss.backward()
        self.take_step()


class Smoothed(Loop):
    """Label smoothing and a z-loss; masking a position masks these, too."""

    is_given = True

    def micro_batch(self, x, mask, weight):
        def forward():
            logits = self.model(x[:, :-1], T)
            smooth, z = logits.log_softmax(-1).mean(-1), logits.logsumexp(-1)
            beside = (-(0.1 * smooth) + 0.1 * z.square()) * mask * (weight != 0)
            found.append(beside.sum())
            log_probs = token_log_probs(logits, x[:, 1:])
            return (log_probs, None, found[-1]) if self.is_given else log_probs

        found = []
        log_probs = self.watch.log_probs(forward, mask, x[:, 1:])
        log_probs = log_probs[0] if self.is_given else log_probs
        (-(0.9 * log_probs * mask * weight).sum() / 96 + found[0] / 96).backward()


class Undeclared(Smoothed):
    """The same, and nothing is said of it."""

    is_given = False


class Grpo(Loop):
    """The surrogate, with what the loop knows of its tokens."""

    def micro_batch(self, x, mask, weight):
        with torch.no_grad():
            old = self.forward(x)
        now = self.log_probs(x, mask, advantages=weight, old_log_probs=old)
        (-(weight * (now - old).exp() * mask).sum() / 96).backward()


class Twice(Loop):
    """Two optimizer steps on a batch."""

    def step(self, ids, mask, weight, each=2):
        super().step(ids, mask, weight, each)
        super().step(ids, mask, torch.ones_like(weight), each)


class Moving(Loop):
    """What a backward leaves waits on the host, as on a card that has room for one micro-batch's."""

    is_exact = norms_are_taken = False  # dL/dz is recovered

    def prepare(self):
        super().prepare()
        if self.folder:
            self.watch.tap.moves_to_host, self.watch.tap.keep_bytes = True, 4000


class Counting(Loop):
    """Its forward moves buffers: in kernels that count nothing, in place, and by another tensor."""

    def build(self):
        model = super().build()
        model.norm_out = torch.nn.Sequential(model.norm_out, Counted().to(DEVICE))
        return model


class Counted(torch.nn.BatchNorm1d):
    def __init__(self):
        super().__init__(build("tiny").head.in_features, affine=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean.lerp(x.detach().mean(), 0.1)
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


KINDS = [Varying, Ungraphed, Evaluating, Failing, Dropping, Late, Smoothed, Undeclared, Grpo, Twice, Moving, Counting]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_loop_may_do(kind, tmp_path):
    check_alone(kind, tmp_path)


def test_each_backward_is_noted(tmp_path, monkeypatch):
    made, noted = Loop(tmp_path), []
    monkeypatch.setattr(made.watch.localizer, "after_backward", lambda: noted.append(made.watch.number))
    made.run(steps=2)
    assert noted == [0] * 4 + [1] * 4


def test_a_step_whose_gradient_lacks_a_micro_batch_is_not_masked(tmp_path):
    class Zeroing(Dropping):
        """The model drops a micro-batch's gradient by filling it with zeros, which leaves no trace."""

        is_set_to_none = False

    made = Zeroing(tmp_path, "mask").run()
    (event,) = events_in(tmp_path)
    assert event["action"]["taken"] == "skip" and made.norms[SPIKE - 1] == 0.0
    assert event["culprits"] == [] and "differs from the optimizer's by" in event["action"]["reason"]


def test_two_backwards_through_the_same_log_probs_add_up(tmp_path):
    class Split(Loop):
        def micro_batch(self, x, mask, weight):
            log_probs = self.log_probs(x, mask)
            (-(log_probs * mask * weight).sum() / 96).backward(retain_graph=True)
            (-(log_probs * mask).sum() / 96).backward()

    made = Split(tmp_path, trigger={"tau": 40.0}).run()
    (event,) = events_in(tmp_path)
    assert named(event) == [PLANT] and event["culprits"][0]["values"]["loss_weight"] == pytest.approx(
        (WORTH + 1) * 93 / 96
    )
    assert made.norms == Split().run().norms


def test_a_function_keeps_the_values_that_its_variables_had():
    made, given = [], [1, 2]
    for value in given:

        def both(more=1):
            nonlocal seen
            seen = value  # noqa: B023
            return value + more  # noqa: B023

        seen = None
        made.append(frozen(both))
    assert [each() for each in made] == [2, 3] and seen is None, "the loop's own variable is left alone"


def test_a_function_keeps_of_a_script_only_what_it_names():
    script = {"value": 2, "large": torch.zeros(9), "__name__": "script"}
    exec("made = lambda: [value * len(str(more)) for more in (1, 22)]", script)
    kept = frozen(script["made"])
    script["value"] = 3
    assert kept() == [2, 4] and "large" not in kept.__globals__


def test_a_checkpoint_carries_what_was_learned(tmp_path):
    first = Loop(tmp_path / "a", trigger={"warmup": 2, "window": 8}).run(steps=4, worth=1.0)
    state = json.loads(json.dumps(first.watch.state_dict()))
    second = Loop(tmp_path / "b", trigger={"warmup": 2, "window": 8})
    second.watch.load_state_dict(state)
    second.run(steps=1)
    assert second.watch.number == 5 and second.watch.metrics["gradloc/threshold"] > 0
    assert second.watch.state_dict() != state


def test_a_copy_of_the_optimizer_is_its_own(tmp_path):
    made = Loop(tmp_path)
    copied = copy.deepcopy(made.optimizer)
    assert "zero_grad" in vars(made.optimizer) and "zero_grad" not in vars(copied)


# ---- what cannot be run again


def test_a_forward_that_is_not_the_same_again_is_said(tmp_path):
    class Other(Loop):
        """Its model counts in a place that no watch knows."""

        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            count = iter(range(1, 10**6))
            self.model.blocks[0].register_forward_hook(lambda module, args, output: output * (1 + next(count) / 10))

    Other(tmp_path, "mask").run()
    (event,) = events_in(tmp_path)
    assert event["culprits"] == [] and event["action"]["taken"] == "skip"
    assert "something else when run again" in event["certificate"]["reason"]


def test_an_input_that_was_changed_in_place_is_said(tmp_path):
    class Reusing(Loop):
        def forward(self, x):
            self.buffer = x.clone()
            return token_log_probs(self.model(self.buffer[:, :-1], T), x[:, 1:])

        def take_step(self):
            self.buffer.zero_()
            super().take_step()

    made = Reusing(tmp_path).run()
    (event,) = events_in(tmp_path)
    assert event["culprits"] == [] and "changed in place" in event["certificate"]["reason"]
    assert made.norms == Loop().run().norms


# ---- one sentence


@pytest.mark.parametrize(
    "given, said",
    [
        ({"action": "maks"}, "gradloc.action.mode must be observe, mask, skip, abort or off in a loop, of whose loss"),
        ({"action": "heal"}, "gradloc.action.mode must be observe, mask, skip, abort or off in a loop"),
        ({"foo": {}}, "unknown setting gradloc.foo: there are "),
        ({"triger": {}}, "unknown setting gradloc.triger: did you mean gradloc.trigger?"),
        ({"critic": "mask"}, "gradloc.critic must be off with a loop, which has none"),
        ({"evidence": {"bundle": "full"}}, "gradloc.evidence.bundle must be off in a loop of one's own"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(tmp_path, given, said):
    with pytest.raises(ValueError) as caught:
        Loop(tmp_path, **given)
    assert str(caught.value).startswith(said)
    assert "foo" not in given or "buckets, quartiles" in str(caught.value)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"forward": torch.ones(2, T)}, "first argument must be a function, found 'Tensor'"),
        ({"mask": None}, "mask must be a tensor (B, T), found 'NoneType'"),
        ({"mask": torch.ones(T)}, f"mask must be a tensor (B, T), found ({T},)"),
        ({"advantages": [1.0, 2.0]}, "advantages must be a tensor, found 'list'"),
        ({"advantages": torch.ones(3)}, "advantages has shape (3, 1), the mask (2, 12)"),
        ({"ids": torch.ones(2, T + 1)}, "the ids have shape (2, 13), the mask (2, 12)"),
        ({"rows": ["one"]}, "rows has 1 names for 2 rows"),
        ({"entropy": True}, "with entropy=True the function returns (log_probs, entropies)"),
        ({"forward": lambda: {"log_probs": 1}}, "found dict."),
        ({"forward": lambda: None}, "found NoneType."),
        ({"forward": lambda: (torch.ones(2, T), None, 0.0)}, "found Tensor, NoneType, float."),
        ({"forward": lambda: [torch.ones(2, T)] * 4}, "found Tensor, Tensor, Tensor, Tensor."),
    ],
)
def test_arguments_of_another_kind_or_shape_are_refused_in_one_sentence(tmp_path, change, said):
    given = {"forward": lambda: torch.ones(2, T), "mask": torch.ones(2, T), "ids": torch.ones(2, T), **change}
    with pytest.raises(ValueError) as caught:
        Loop(tmp_path).watch.log_probs(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda model, optimizer: (model, [optimizer, optimizer]),
            "optimizer must be one torch optimizer, found 'list'",
        ),
        (lambda model, optimizer: (optimizer, model), "model must be a torch.nn.Module, found 'SGD'"),
        (lambda model, optimizer: (model.requires_grad_(False), optimizer), "a parameter that requires a gradient"),
    ],
)
def test_a_model_or_optimizer_of_another_kind_is_refused(tmp_path, change, said):
    model = build("tiny")
    with pytest.raises(ValueError) as caught:
        gradloc.Watch(*change(model, torch.optim.SGD(model.parameters(), lr=0.1)), tmp_path)
    assert said in str(caught.value)


def test_logits_and_ids_of_other_positions_are_refused():
    with pytest.raises(ValueError, match=r"pass logits\[:, :-1\] and ids\[:, 1:\]"):
        token_log_probs(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.long))


def test_a_clip_without_log_probs_is_torch_s(tmp_path):
    made = Loop(tmp_path)
    made.model(torch.zeros(1, 3, dtype=torch.long, device=DEVICE), 2).sum().backward()
    wanted = copy.deepcopy(made.model)
    for param, other in zip(made.model.parameters(), wanted.parameters(), strict=True):
        other.grad = param.grad.clone()
    assert made.watch.clip_grad_norm_(1.0) == torch.nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
    assert made.watch.number == 1


def test_a_step_after_our_clip_is_not_looked_into_again(tmp_path, monkeypatch):
    made, meetings = Loop(tmp_path), []
    own = made.watch.ranks.sum
    monkeypatch.setattr(made.watch.ranks, "sum", lambda values: meetings.append(0) or own(values))
    counts = []
    step = made.optimizer.step
    monkeypatch.setattr(made.optimizer, "step", lambda *given, **more: (counts.append(len(meetings)), step())[1])
    made.run(2)
    after = [*counts[1:], len(meetings)]
    made.watch.check_step()
    assert len(meetings) == after[-1] + 1, "a look meets once at least"
    assert counts[0] > 0 and after[-1] == counts[-1], "the ranks met in the optimizer's step"


# ---- log-probs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_in_pieces_are_those_of_the_whole(monkeypatch, dtype):
    monkeypatch.setattr("gradloc.watch.log_probs._CHUNK", 3 * 11)  # three positions at a time
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 11, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(11, (4, 5), generator=generator)
    ids[1, 2] = -100
    pulls = [torch.randn(4, 5, generator=generator) for _ in range(2)]
    found = token_log_probs(logits, ids, entropy=True)
    (gradient,) = torch.autograd.grad(sum((f * p).sum() for f, p in zip(found, pulls, strict=True)), logits)
    wide = logits.detach().double().requires_grad_()
    every = wide.log_softmax(-1)
    own = torch.where(ids < 0, 0.0, every.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1))
    slow = own, -(every.exp() * every).sum(-1)
    (wanted,) = torch.autograd.grad(sum((f * p).sum() for f, p in zip(slow, pulls, strict=True)), wide)
    off = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, slow, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), wanted, atol=off, rtol=off)
    alone = token_log_probs(logits, ids)
    assert torch.equal(alone, found[0]) and alone.dtype == torch.promote_types(dtype, torch.float32)


def test_log_probs_and_entropies_may_be_written_into():
    logits, keep = torch.randn(2, 3, 7, requires_grad=True), torch.tensor([1.0, 0.0, 1.0])
    ids = torch.zeros(2, 3, dtype=torch.long)
    gradients = []
    for multiply in (torch.Tensor.mul, torch.Tensor.mul_):
        parts = [multiply(part, keep).sum() for part in token_log_probs(logits, ids, entropy=True)]
        gradients += torch.autograd.grad(sum(parts), logits)
    assert torch.equal(*gradients)


def test_half_precision_logits_are_not_held_in_float32():
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_log_probs(logits, torch.zeros(64, dtype=torch.long)).sum().backward()
    assert {each.dtype for each in kept if each.numel() >= logits.numel()} == {torch.bfloat16}


def test_off_calls_the_loop_s_own_alone(tmp_path):
    assert Loop(tmp_path, "off").run().norms == Loop().run().norms
    assert not list(tmp_path.iterdir())


def test_a_gradient_that_the_loop_has_clipped_before_ours_is_seen_as_it_was(tmp_path):
    class Twice(Loop):
        def take_step(self):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            super().take_step()

    made = Twice(tmp_path).run()
    (event,) = events_in(tmp_path)
    assert named(event) == [PLANT] and event["certificate"]["verdict"] == "explained"
    assert torch.equal(flat(made.model), flat(Twice().run().model))


def test_an_overflow_by_fp16_s_scale_alone_is_no_spike_and_a_nan_is(tmp_path):
    class Overflowing(Loop):
        def __init__(self, *given, **more):
            super().__init__(*given, precision="float16", **more)
            self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**24)

    made = Overflowing(tmp_path, "mask").run(steps=9, worth=1.0)
    assert not math.isfinite(made.norms[0]) and math.isfinite(made.norms[-1]) and events_in(tmp_path) == []
    Overflowing(tmp_path, "mask").run(worth=math.nan)
    (event,) = events_in(tmp_path)
    assert named(event) == [PLANT] and event["action"]["taken"] == "skip"
