# SPDX-License-Identifier: Apache-2.0
"""A step's loss and its coefficients, on the device and on the host, where they are read once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.core.gradients import GradientSpace
from gradloc.core.host_step import HostStep, to_host
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.step import Details, LossReplay, Outputs, Recorded, has_finite_loss, kl_coefficients, run_backward
from gradloc.fault.reference import with_live_loss
from tests.toy_model import Loss, ToyStep, build, random_batch, shard

M, CPU = 4, torch.device("cpu")


class Given(LossReplay):
    """The sum of sqrt(log-prob), and three times the log-prob as its KL term."""

    def __init__(self, log_prob, has_kl=True):
        super().__init__(CPU, num_ranks=1)
        self.log_prob, self.has_kl = log_prob, has_kl

    def recorded(self, micro_batch):
        return recorded_of(self.log_prob)

    @property
    def without_kl(self):
        return {"kl": 0.0} if self.has_kl else None

    def loss_under(self, micro_batch, given, settings, tensors):
        return given.log_prob.sqrt().sum() + settings.get("kl", 3.0) * given.log_prob.sum()


def recorded_of(log_prob, **coefficients):
    found = Recorded(rng=None, **{name: torch.tensor([value]) for name, value in coefficients.items()})
    found.log_prob = torch.tensor([log_prob])
    return found


def test_a_coefficient_is_of_the_mean_over_the_ranks_without_the_scale():
    weight = 1 / (2 * 4.0)  # two ranks, of a scaled loss
    found = recorded_of([4.0, 9.0], log_prob_coefficient=[16.0, -8.0], entropy_coefficient=[8.0, 0.0])
    log_prob, entropy = found.coefficients(weight)
    assert log_prob.tolist() == [[2.0, -1.0]] and entropy.tolist() == [[1.0, 0.0]]
    log_prob, entropy = recorded_of([4.0, 9.0]).coefficients(weight)
    assert log_prob.tolist() == [[0.0, 0.0]] and entropy is None, "a loss without a gradient"


def test_the_kl_term_s_part_is_what_the_loss_without_it_lacks():
    assert kl_coefficients(Given([4.0, 9.0]), 0).tolist() == [[pytest.approx(3.0)] * 2]
    assert kl_coefficients(Given([4.0], has_kl=False), 0) is None
    assert kl_coefficients(object(), 0) is None, "a trainer that cannot tell"


@pytest.mark.parametrize(("log_prob", "is_finite"), [([4.0, 9.0], True), ([4.0, 0.0], False), ([-1.0, 4.0], False)])
def test_a_loss_is_finite_where_its_derivative_is(log_prob, is_finite):
    assert has_finite_loss(Given(log_prob), 0) is is_finite


MASKS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3).map(torch.tensor)


@given(MASKS, st.integers(0, 2**30))
def test_what_two_halves_of_the_tokens_pull_with_adds_up_to_what_all_do(mask, seed):
    draw = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed))
    draw[0, 0, 0] = float("nan")
    recorded = Recorded(rng=None, log_prob_coefficient=draw[0], entropy_coefficient=draw[1])
    whole, halves = recorded.pull(None), [recorded.pull(mask), recorded.pull(~mask)]
    for of_all, one, other in zip(whole[:2], halves[0][:2], halves[1][:2], strict=True):
        assert torch.equal((one + other).nan_to_num(7.0), of_all.nan_to_num(7.0))
        assert not one[~mask].any(), "an exact 0, also where the coefficient is not finite"


def test_a_factor_takes_the_place_of_a_selection_and_what_passes_through_no_token_stays():
    recorded = Recorded(rng=None, log_prob_coefficient=torch.tensor([2.0, 2.0, 4.0]))
    recorded.auxiliary_coefficient = torch.tensor(0.5)
    pull = recorded.pull(torch.tensor([-0.75, 0.0, 2.0]))
    assert pull.log_prob.tolist() == [-1.5, 0.0, 8.0] and pull.entropy is None and float(pull.auxiliary) == 0.5


def test_a_backward_from_the_recorded_coefficients_is_training_s_bit_for_bit():
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    recorded = Recorded(rng=None)

    def forward():
        hidden = weights.tanh() @ weights
        return Outputs(hidden.log_softmax(-1), hidden.softmax(-1), hidden.square().mean())

    outputs = forward()
    recorded.hook(outputs)
    (
        (outputs.log_prob.exp() * outputs.log_prob).sum() + outputs.entropy.square().sum() + outputs.auxiliary / 3
    ).backward()
    trained, weights.grad = weights.grad, None
    run_backward(forward(), recorded.pull(None))
    assert torch.equal(weights.grad, trained)


def test_tensors_of_any_type_are_read_together_as_they_are():
    given = [
        torch.tensor([[True, False, True]]),
        None,
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.zeros(0),
        torch.arange(4.0).view(1, 4).T[:1],  # contiguous, and yet of another stride
        torch.tensor([7], dtype=torch.int64),
        torch.tensor([0.1], dtype=torch.float64).requires_grad_(),
    ]
    for found, wanted in zip(to_host(given), given, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.dtype == wanted.dtype and torch.equal(found, wanted) and not found.requires_grad


def test_a_step_on_the_host_says_what_the_step_says_and_asks_it_once():
    model = shard(build("tiny"), "plain")
    step = ToyStep(model, random_batch(model), M, loss=Loss(entropy=0.1, kl=0.1))
    step.train()
    host = HostStep(step, CPU)
    for index in range(M):
        details, own = host.details(index), step.recorded(index)
        pairs = [(host.token_mask(index), step.token_mask(index)), (host.token_weights(index), details.weights)]
        pairs += [(getattr(details, name), getattr(step.details(index), name)) for name in ("old_log_prob", "weights")]
        pairs += zip(host.coefficients(index), own.coefficients(step.weight), strict=True)
        pairs.append((host.kl_coefficients(index), kl_coefficients(step, index)))
        with torch.no_grad():
            pairs += zip(host.forward(index, True), step.forward(index, True), strict=True)
        pairs += [(getattr(host.recorded(index), name), getattr(own, name)) for name in vars(own) if name != "rng"]
        for selected in (step.token_mask(index), None):
            pairs += zip(host.pull(index, selected), own.pull(selected), strict=True)
        tensors = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
        assert len(tensors) >= 12 and all(torch.equal(*pair) for pair in tensors)
        assert all(found == wanted for found, wanted in pairs if not isinstance(wanted, torch.Tensor))
    assert host.token_mask(1) is host.token_mask(1) and host.recorded(2) is host.recorded(2)
    assert host.num_micro_batches == M and not host.is_scheduled


def test_where_a_trainer_tells_no_weights_tokens_count_as_in_a_mean():
    model = shard(build("tiny"), "plain")
    step = ToyStep(model, random_batch(model), M)
    wanted = [step.details(index).weights for index in range(M)]
    step.train()
    step.details = lambda index: Details()
    host = HostStep(step, CPU)
    for index in range(M):
        torch.testing.assert_close(host.token_weights(index), wanted[index], check_dtype=False)


def test_a_loss_without_a_setting_would_not_change_by_it():
    model = build("tiny")
    step = ToyStep(model, random_batch(model), 4)
    assert not step.would_change({"clip": 9.0})
    step.setting = {"clip": 0.2}.__getitem__
    assert step.would_change({"clip": 9.0}) and not step.would_change({"clip": 0.2})
    assert not step.would_change({"clip": 9.0, "dual_clip": 3.0}), "it has to have all of them"


def test_a_unit_divides_all_coefficients_until_another_is_set():
    model = shard(build("tiny"), "plain")
    step = ToyStep(model, random_batch(model), M, loss=Loss(entropy=0.1))
    step.train()
    host = HostStep(step, CPU)
    before = [host.coefficients(index) for index in range(M)]
    for unit in (4.0, 0.5, 1.0):
        host.rescale(unit)
        for index in range(M):
            pairs = zip(host.coefficients(index), before[index], strict=True)
            assert all(torch.equal(found * unit, own) for found, own in pairs)


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_a_step_whose_loss_follows_the_weights_has_training_s_gradient_where_they_have_not_moved(loss_scale):
    model = build("tiny")
    step, space = ToyStep(model, random_batch(model), M, loss=Loss(kl=0.1), loss_scale=loss_scale), GradientSpace(model)
    step.train()
    trained = space.take()
    Prober(with_live_loss(step), space, Ranks()).compute((index, None) for index in range(M))
    for found, whole in zip(space.take(), trained, strict=True):
        torch.testing.assert_close(loss_scale * found, whole, rtol=1e-4, atol=1e-5)


def test_the_first_micro_batch_is_kept_alone():
    model = build("tiny")
    step, space = ToyStep(model, random_batch(model), M), GradientSpace(model)
    step.train()
    gradients = []
    for each in (step.kept(), step):
        Prober(each, space, Ranks()).compute([(0, None)])
        gradients.append(space.take())
    assert step.kept().num_micro_batches == 1 and step.num_micro_batches == M
    assert all(torch.equal(kept, first) for kept, first in zip(*gradients, strict=True)), "bit for bit"
