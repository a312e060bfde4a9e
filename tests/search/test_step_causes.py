# SPDX-License-Identifier: Apache-2.0
"""A spike that no token made is told from one that tokens made, and so is the module where a NaN first appears."""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradloc.core import host_step
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.selection import mask_without
from gradloc.search import step_causes
from gradloc.search.find import localize
from gradloc.search.step_causes import _Sizes
from gradloc.search.task import SearchResult
from tests.search import spike_of
from tests.toy_model import ToyStep, build, random_batch
from tests.toy_model.routers import add_router_loss

THRESHOLD = 20.0  # healthy norms are near 1
PLANT = {(3, 2): 1e4}


class Spiking:
    """A model, a batch and what happens to them; searched as a spike."""

    def __init__(self, plants: dict | None = None, factor: float = 1.0):
        self.model = build("tiny")
        batch = random_batch(self.model).planted(plants or {})
        self.batch = batch.edited(advantages=batch.advantages * factor)
        self.space = GradientSpace(self.model)
        self.step = ToyStep(self.model, self.batch, 4)

    def search(self, typical: dict | None = None, corrupt=lambda space: None, clip=1.0, **settings) -> SearchResult:
        self.step.train()
        corrupt(self.space)
        spike = spike_of(self.batch, self.space.norm(), THRESHOLD)
        assert not spike.grad_norm <= THRESHOLD
        self.space.scale(clip)
        return localize(self.step, self.space, Ranks(), spike, clip, None, typical, **settings)

    def coefficient(self) -> float:
        """The healthy batch's median coefficient, in a history of ten steps."""
        return {"coefficient": (1.0 / self.batch.num_tokens, 3.0)}


def test_a_weight_that_is_not_finite_is_named_without_a_single_forward():
    spiking = Spiking()
    with torch.no_grad():
        spiking.model.blocks[1].mlp.up.weight[5, 7] = math.nan
        spiking.model.head.weight[0, 0] = math.inf
    found = spiking.search()
    assert found.source.label == "non_finite_weights"
    assert set(found.source.names) == {"blocks.1.mlp.up.weight", "head.weight"}
    assert (found.num_forwards, found.num_backwards, found.tokens, found.status) == (0, 0, [], "not_found")
    assert found.certificate.verdict == "not_explained"


def test_a_large_weight_is_finite_though_its_square_is_not():
    space = Spiking().space
    with torch.no_grad():
        space.params[0].view(-1)[0] = 1e30
    assert step_causes.non_finite_weights(space) == ()


def test_packed_weights_are_integers_and_finite():
    spiking = Spiking()
    for name, dtype in (("packed", torch.uint8), ("coarse", torch.float8_e4m3fn)):
        setattr(spiking.model, name, torch.nn.Parameter(torch.zeros(4).to(dtype), requires_grad=False))
    with torch.no_grad():
        spiking.model.head.weight[0, 0] = math.inf
    assert step_causes.non_finite_weights(GradientSpace(spiking.model)) == ("head.weight",)


def test_a_padded_position_is_blamed_where_it_alone_is_not_finite():
    mask = random_batch(build("tiny")).mask
    row, position = (~mask).nonzero()[3].tolist()
    found = Spiking({(row, position): math.nan}).search()
    assert found.source.label == "non_finite_padding" and found.tokens == []
    assert found.source.places == ((row, position),)
    assert found.certificate.verdict == "explained" and found.certificate.norm_after < THRESHOLD
    assert found.certificate.error_bound == pytest.approx(2**-24 * 4**2 * found.certificate.norm_after)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_s_own_loss_that_is_not_finite_is_the_token_s(value):
    found = Spiking({(3, 2): value, (9, 1): value}).search()
    assert found.source is None and len(found.tokens) == 2
    assert found.certificate.verdict == "explained"


def test_a_forward_that_breaks_is_one_span_a_row_from_where_it_breaks():
    spiking = Spiking()

    def hook(block, inputs, output):
        broken = output.clone()
        if torch.equal(spiking.batch.tokens[:4], seen[0]):
            broken[2, 8:] = math.nan
        return broken

    seen = []
    spiking.model.register_forward_pre_hook(lambda model, inputs: seen.insert(0, inputs[0]))
    spiking.model.blocks[-1].register_forward_hook(hook)
    found = spiking.search()
    assert found.source is None
    (culprit,) = found.culprits
    assert {token.micro_batch for token in culprit.tokens} == {0}
    before, length = (int(spiking.batch.mask[rows].sum()) for rows in (slice(0, 2), slice(2, 3)))
    assert culprit.span == "segment"
    assert [token.index for token in culprit.tokens] == list(range(before + 4, before + length))


def test_a_batch_that_is_scaled_as_a_whole_is_told_by_the_run_s_own_history():
    spiking = Spiking(factor=1e4)
    found = spiking.search(spiking.coefficient())
    assert found.source.label == "batch_scale" and found.tokens == []
    factor = found.source.numbers["coefficient_over_typical"]
    assert 1e3 < factor < 1e5
    assert found.num_forwards == 0


def test_a_culprit_in_a_batch_that_is_a_little_larger_is_still_the_culprit():
    spiking = Spiking({(3, 2): 1e6}, factor=5.0)
    found = spiking.search(spiking.coefficient())
    assert found.source is None and [t.micro_batch for t in found.tokens] == [0]


def test_a_spike_that_does_not_come_back_is_no_token_s():
    def corrupt(space):
        space.params[3].grad.view(-1)[11] = 1e5

    for reruns in (True, False):
        found = Spiking().search(corrupt=corrupt, reruns=reruns)
        assert found.source.label == "gradient_changed" and found.tokens == []
        assert found.fault.at == "after_backward" and len(found.fault.parameters) == 1


def test_a_machine_that_does_not_repeat_itself_is_no_token_s():
    spiking, factors = Spiking(), itertools.count(1)
    spiking.model.head.weight.register_hook(lambda grad: grad * 1e4 / next(factors) ** 3)
    found = spiking.search(reruns=True)
    assert not found.rerun.is_reproduced or found.source is not None
    assert found.source.label == "transient" and found.tokens == []


def test_a_spike_that_comes_back_is_searched():
    found = Spiking(PLANT).search(reruns=True)
    assert found.rerun.is_reproduced and found.rerun.difference < 1e-4
    assert found.source is None and len(found.tokens) == 1


def without(spiking, culprits):
    """The true norm of the step without these."""
    spiking.space.clear()
    for index in range(4):
        kept = mask_without(culprits, index, 0, spiking.step.token_mask(index))
        spiking.step.loss(index, kept).backward()
    return spiking.space.norm()


def test_what_passes_through_no_token_is_not_taken_for_the_culprit_s(monkeypatch):
    monkeypatch.setattr(host_step, "ByRow", host_step.Scheduled)  # an engine whose micro-batches come whole
    spiking = Spiking({(3, 2): 300.0})
    add_router_loss(spiking.model, 1.0)
    found = spiking.search()
    certificate = found.certificate
    assert certificate.method == "subtract" and certificate.replay_difference > 0.3, "the router's, of both backwards"
    assert len(found.tokens) == 1 and certificate.norm_after == pytest.approx(without(spiking, found.tokens), rel=1e-4)


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_nor_for_two_culprits_of_which_one_ran_twice(size):
    spiking = Spiking({(3, 2): 300.0, (9, 1): 300.0})
    add_router_loss(spiking.model, size)
    found = spiking.search()
    certificate = found.certificate
    assert len(found.tokens) == 2 and certificate.verdict == "explained"
    assert abs(certificate.norm_after - without(spiking, found.tokens)) <= certificate.error_bound


def test_a_bound_larger_than_its_norm_is_tightened_by_one_pass():
    spiking = Spiking({(3, 2): 300.0})
    add_router_loss(spiking.model, 3.0)  # what passes through no token is noise to a subtraction
    certificate = spiking.search().certificate
    assert certificate.verdict == "explained" and certificate.method == "recompute"
    assert certificate.error_bound < certificate.norm_after / 2


@pytest.mark.parametrize("plants", [{}, PLANT])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_what_no_token_made_is_told_with_culprits_beside_it_whatever_clipping_left(plants, is_hooked):
    """A router's loss, measured by itself, or a hook that scales the gradient, where no token is accused."""
    told = []
    for clip in (1.0, 0.25):  # a power of two rounds nothing
        spiking = Spiking(plants)
        if is_hooked:
            spiking.model.head.weight.register_hook(lambda grad: grad * 1e4)
        else:
            add_router_loss(spiking.model, 3e4)
        found = spiking.search(clip=clip, reruns=is_hooked)
        told.append((found.source, found.rerun, found.path, found.certificate, found.tokens))
    assert told[0] == told[1]
    source, numbers, certificate = found.source, found.source.numbers, found.certificate
    assert source.label == "not_tokens" and certificate.verdict == "not_explained"
    assert len(found.tokens) == (1 if plants and not is_hooked else 0)
    assert found.tokens or certificate.reason == source.reason, "and no token is looked for in the rest"
    if is_hooked:
        assert source.names[0] == "head.weight" and numbers["closure"] < 0.1
    else:
        assert source.names[0].startswith("blocks.") and numbers["others_norm"] > THRESHOLD
        assert numbers["tokens_norm"] > THRESHOLD if plants else 0.1 < numbers["tokens_norm"] < THRESHOLD


@pytest.mark.parametrize(
    ("usual", "names"),
    [(None, ("a", "b")), ({"a": 91.0, "b": 0.1, "c": 1e-9}, ("b", "a")), ({"a": 0.0, "b": 0.0}, ("a", "b"))],
)
def test_parameters_with_a_notable_part_are_suspect_and_first_those_far_above_what_is_usual(usual, names):
    assert step_causes.suspects({"b": 5.0, "a": 91.0, "c": 4.0}, usual) == names, "from a twentieth of the square on"


class Pair(Ranks):
    """Two processes, one after the other: the second one's maximum is over both."""

    def __init__(self):
        super().__init__()
        self.num_processes, self.sent = 2, []

    def run_local_synced(self, local):
        return local()

    def max(self, values):
        self.sent.append(values)
        return [max(pair) for pair in zip(*self.sent, strict=True)]


@pytest.mark.parametrize("off_by", [0.0, 1e-3])
def test_a_parameter_that_two_replicas_hold_differently_is_named(off_by):
    ranks, found = Pair(), []
    for shift in (0.0, off_by):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.fill_(-0.25 + shift)
        space = GradientSpace(model)
        assert step_causes.diverged_params(space, ranks) == (), "one process has no replica"
        space.num_replicas = 2
        found.append(step_causes.diverged_params(space, ranks))
    assert found == [(), ("bias",) if off_by else ()]


# ---- where a gradient stops being finite


WAYS = ("forward", "backward")


class Grows(torch.autograd.Function):
    """Times one factor forward, times another backward."""

    @staticmethod
    def forward(ctx, values, forth, back):
        ctx.back = back
        return values * forth

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.back, None, None


class Block(torch.nn.Module):
    def __init__(self, forth: float, back: float):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.factors = forth, back

    def forward(self, values):
        return values + self.down(Grows.apply(self.up(values), *self.factors)), None


class Model(torch.nn.Module):
    def __init__(self, factors, reentrant: bool | None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(*of_block) for of_block in factors)
        self.head = torch.nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, values):
        for block in self.blocks:
            kept = self.reentrant is None
            values, _ = block(values) if kept else checkpoint(block, values, use_reentrant=self.reentrant)
        return self.head(values)


def looked_at(factors, reentrant=None):
    model, sizes = Model(factors, reentrant), _Sizes()
    with sizes.of(model):
        values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(values).sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    return model, sizes


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize(
    ("factors", "module", "way"),
    [
        ([(1.0, 1.0), (math.inf, 1.0), (1.0, 1.0)], "blocks.1.down", "forward"),
        ([(1.0, 1.0), (1.0, math.inf), (1.0, 1.0)], "blocks.1.up", "backward"),
        ([(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], None, None),
    ],
    ids=["forward", "backward", "finite"],
)
def test_it_is_named_with_what_came_before_it(factors, module, way, reentrant):
    model, sizes = looked_at(factors, reentrant)
    first = sizes.first(WAYS)
    assert (first and (first.module, first.way)) == (module and (module, way))
    if way == "forward":
        assert list(first.before) == ["blocks.0.down", "blocks.0", "blocks.1.up"]
        values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
        assert first.before["blocks.0"] == pytest.approx(float(model.blocks[0](values)[0].abs().max()))
    if way == "backward":
        assert list(first.before)[-1] == "blocks.1.down" and all(map(math.isfinite, first.before.values()))


def test_outputs_that_are_infinite_on_purpose_are_passed_over_where_the_forward_is_known_to_be_finite():
    _, sizes = looked_at([(math.inf, math.inf)])
    assert sizes.first(WAYS).way == "forward" and sizes.first(WAYS[1:]).way == "backward"
