# SPDX-License-Identifier: Apache-2.0
"""Spikes that no token makes are told apart from those that tokens make, on a bare model."""

import math

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.history import ScaleHistory
from gradloc.core.ranks import Ranks
from gradloc.core.selection import mask_without
from gradloc.core.trigger import Spike
from gradloc.search.find import Finding, localize
from tests.bare import BareStep, build, random_batch
from tests.bare.routers import add_router_loss

THRESHOLD = 20.0  # healthy norms are near 1
PLANT = {(3, 2): 1e4}


class Spiking:
    """A model, a batch and what happens to them; searched as a spike."""

    def __init__(self, plants: dict | None = None, factor: float = 1.0):
        self.model = build("tiny")
        batch = random_batch(self.model).planted(plants or {})
        self.batch = batch.edited(advantages=batch.advantages * factor)
        self.space = GradientSpace(self.model)
        self.step = BareStep(self.model, self.batch, 4)

    def search(self, typical: dict | None = None, corrupt=lambda space: None, clip=1.0, **settings) -> Finding:
        self.step.train()
        corrupt(self.space)
        norm = self.space.norm()
        kind = "fixed" if math.isfinite(norm) else "non_finite"
        tau = THRESHOLD * self.batch.num_tokens**0.5
        spike = Spike(kind, norm, THRESHOLD, tau, self.batch.num_tokens)
        assert spike.kind == "non_finite" or norm > THRESHOLD
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
    assert found.result.source.label == "non_finite_weights"
    assert set(found.result.source.names) == {"blocks.1.mlp.up.weight", "head.weight"}
    assert (found.num_forwards, found.num_backwards, found.tokens, found.status) == (0, 0, [], "not_found")
    assert found.certificate.verdict == "not_explained"


def test_a_padded_position_is_blamed_where_it_alone_is_not_finite():
    mask = random_batch(build("tiny")).mask
    row, position = (~mask).nonzero()[3].tolist()
    found = Spiking({(row, position): math.nan}).search()
    assert found.result.source.label == "non_finite_padding" and found.tokens == []
    assert found.result.source.places == ((row, position),)
    assert found.certificate.verdict == "explained" and found.certificate.norm_after < THRESHOLD


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_s_own_loss_that_is_not_finite_is_the_token_s(value):
    found = Spiking({(3, 2): value, (9, 1): value}).search()
    assert found.result.source is None and len(found.tokens) == 2
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
    assert found.result.source is None
    (culprit,) = found.result.culprits
    assert {token.micro_batch for token in culprit.tokens} == {0}
    before, length = (int(spiking.batch.mask[rows].sum()) for rows in (slice(0, 2), slice(2, 3)))
    assert culprit.span == "segment"
    assert [token.index for token in culprit.tokens] == list(range(before + 4, before + length))


def test_a_batch_that_is_scaled_as_a_whole_is_told_by_the_run_s_own_history():
    spiking = Spiking(factor=1e4)
    found = spiking.search(spiking.coefficient())
    assert found.result.source.label == "batch_scale" and found.tokens == []
    factor = found.result.source.numbers["coefficient_over_typical"]
    assert 1e3 < factor < 1e5
    assert found.num_forwards == 0


def test_a_culprit_in_a_batch_that_is_a_little_larger_is_still_the_culprit():
    spiking = Spiking({(3, 2): 1e6}, factor=5.0)
    found = spiking.search(spiking.coefficient())
    assert found.result.source is None and [t.micro_batch for t in found.tokens] == [0]


def test_a_spike_that_does_not_come_back_is_no_token_s():
    def corrupt(space):
        space.params[3].grad.view(-1)[11] = 1e5

    found = Spiking().search(corrupt=corrupt, reruns=True)
    assert not found.rerun.is_reproduced and found.rerun.norm < THRESHOLD
    assert found.result.source.label == "transient" and found.tokens == [] and found.num_backwards == 4
    assert Spiking().search(corrupt=corrupt).result.source.label == "transient", "told without being asked, too"


def test_a_spike_that_comes_back_is_searched():
    found = Spiking(PLANT).search(reruns=True)
    assert found.rerun.is_reproduced and found.rerun.difference < 1e-4
    assert found.result.source is None and len(found.tokens) == 1


def test_a_loss_that_passes_through_no_token_is_measured_by_itself():
    spiking = Spiking()
    add_router_loss(spiking.model, 3e4)
    found = spiking.search()
    source = found.result.source
    assert source.label == "not_tokens" and found.tokens == []
    assert source.names[0].startswith("blocks.") and source.numbers["others_norm"] > THRESHOLD
    assert 0.1 < source.numbers["tokens_norm"] < THRESHOLD


def test_a_culprit_beside_such_a_loss_is_named_and_both_parts_are_told():
    spiking = Spiking(PLANT)
    add_router_loss(spiking.model, 3e4)
    found = spiking.search()
    assert found.result.source.label == "not_tokens" and len(found.tokens) == 1
    assert found.certificate.verdict == "not_explained"
    assert found.result.source.numbers["tokens_norm"] > THRESHOLD


def test_what_passes_through_no_token_is_not_taken_for_the_culprit_s():
    spiking = Spiking({(3, 2): 300.0})
    add_router_loss(spiking.model, 1.0)
    found = spiking.search()
    certificate, (culprit,) = found.certificate, found.tokens
    spiking.space.clear()
    for index in range(4):
        kept = mask_without([culprit], index, 0, spiking.step.token_mask(index))
        spiking.step.loss(index, kept).backward()
    assert certificate.method == "subtract" and certificate.replay_difference > 0.3, (
        "the router's own, of both backwards"
    )
    assert certificate.norm_after == pytest.approx(spiking.space.norm(), rel=1e-4)


def test_a_bound_larger_than_its_norm_is_tightened_by_one_pass():
    spiking = Spiking({(3, 2): 300.0})
    add_router_loss(spiking.model, 3.0)  # what passes through no token is noise to a subtraction
    certificate = spiking.search().certificate
    assert certificate.verdict == "explained" and certificate.method == "recompute"
    assert certificate.error_bound < certificate.norm_after / 2


@pytest.mark.parametrize("plants", [{}, PLANT])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_both_are_told_as_they_are_whatever_clipping_left_of_them(plants, is_hooked):
    told = []
    for clip in (1.0, 0.25):  # a power of two rounds nothing
        spiking = Spiking(plants)
        if is_hooked:
            spiking.model.head.weight.register_hook(lambda grad: grad * 1e4)
        else:
            add_router_loss(spiking.model, 3e4)
        found = spiking.search(clip=clip, reruns=True)
        told.append((found.result.source, found.rerun, found.result.path, found.certificate, found.tokens))
    assert told[0] == told[1] and told[0][0].label == "not_tokens"


@pytest.mark.parametrize("plants", [{}, PLANT])
def test_a_gradient_that_a_hook_scales_is_doubted_and_no_token_accused(plants):
    spiking = Spiking(plants)
    spiking.model.head.weight.register_hook(lambda grad: grad * 1e4)
    found = spiking.search()
    assert found.result.source.label == "not_tokens" and found.tokens == []
    assert found.result.source.names[0] == "head.weight"
    assert found.result.source.numbers["closure"] < 0.1


def test_a_history_calls_nothing_unusual_that_it_has_seen():
    history = ScaleHistory()
    for value in (1.0, 1.2, 0.9, 1.1, 2.0, 0.8, 0.0, math.nan):
        history.observe({"advantage": value})
    center, usual = history.typical()["advantage"]
    assert 0.9 <= center <= 1.1 and usual >= 3.0
    other = ScaleHistory()
    other.load_state(history.state())
    assert other.typical() == history.typical()
    for number in range(40):
        history.observe({"advantage": 4.0 ** (number % 5)})
    assert history.typical()["advantage"][1] > 100, "a run that goes up and down by itself"
