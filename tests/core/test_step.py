# SPDX-License-Identifier: Apache-2.0
"""What a trainer's step tells of its loss, and the same on the host, read once."""

import pytest
import torch

from gradloc.core.step import HostStep, LossOfGiven, Recorded, to_host
from tests.bare import BareStep, Loss, build, random_batch, shard

M, CPU = 4, torch.device("cpu")


class Given(LossOfGiven):
    """The sum of sqrt(log-prob), and three times the log-prob as its KL term; two ranks, of a scaled loss."""

    dp_size, loss_scale = 2, 4.0

    def __init__(self, log_prob, has_kl=True, **coefficients):
        self._recorded, self._has_kl = Recorded(rng=None), has_kl
        self._recorded.log_prob = torch.tensor([log_prob])
        for name, value in coefficients.items():
            setattr(self._recorded, name, torch.tensor([value]))

    def recorded(self, micro_batch):
        return self._recorded

    def has_kl_term(self):
        return self._has_kl

    def loss_of_given(self, micro_batch, log_prob, is_without_kl=False):
        assert log_prob.requires_grad and log_prob.is_leaf and log_prob.dtype == torch.float32
        return log_prob.sqrt().sum() + (0.0 if is_without_kl else 3.0 * log_prob.sum())


def test_a_coefficient_is_of_the_mean_over_the_ranks_without_the_scale():
    found, entropy = Given([4.0, 9.0], log_prob_coefficient=[16.0, -8.0], entropy_coefficient=[8.0, 0.0]).coefficients(
        0
    )
    assert found.tolist() == [[2.0, -1.0]] and entropy.tolist() == [[1.0, 0.0]]
    found, entropy = Given([4.0, 9.0]).coefficients(0)
    assert found.tolist() == [[0.0, 0.0]] and entropy is None, "a loss without a gradient"


def test_the_kl_term_s_part_is_what_the_loss_without_it_lacks():
    assert Given([4.0, 9.0]).kl_coefficients(0).tolist() == [[pytest.approx(3.0)] * 2]
    assert Given([4.0], has_kl=False).kl_coefficients(0) is None


@pytest.mark.parametrize(("log_prob", "is_finite"), [([4.0, 9.0], True), ([4.0, 0.0], False), ([-1.0, 4.0], False)])
def test_a_loss_is_finite_where_it_and_its_derivative_are(log_prob, is_finite):
    assert Given(log_prob).has_finite_loss(0) is is_finite


def test_tensors_of_any_type_are_read_together_as_they_are():
    given = [
        torch.tensor([[True, False, True]]),
        None,
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.zeros(0),
        torch.tensor([7], dtype=torch.int64),
        torch.tensor([0.1], dtype=torch.float64).requires_grad_(),
    ]
    for found, wanted in zip(to_host(given), given, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.dtype == wanted.dtype and torch.equal(found, wanted) and not found.requires_grad


def test_a_step_on_the_host_says_what_the_step_says_and_asks_it_once():
    model = shard(build("tiny"), "plain")
    step = BareStep(model, random_batch(model), M, loss=Loss(entropy=0.1, kl=0.1))
    step.train()
    host = HostStep(step, CPU)
    for index in range(M):
        pairs = []
        for name in ("token_mask", "token_weights", "kl_coefficients", "old_log_prob", "entropies"):
            pairs.append((getattr(host, name)(index), getattr(step, name)(index)))
        for name in ("coefficients", "forward"):
            pairs += zip(getattr(host, name)(index), getattr(step, name)(index), strict=True)
        for name in Recorded.TENSORS:
            pairs.append((getattr(host.recorded(index), name), getattr(step.recorded(index), name)))
        for selected in (step.token_mask(index), None):
            pairs.append((host.loss(index, selected), step.loss(index, selected)))
        assert all((found is None and wanted is None) or torch.equal(found, wanted) for found, wanted in pairs)
    assert host.token_mask(1) is host.token_mask(1) and host.recorded(2) is host.recorded(2)
    assert host.num_micro_batches == M and not host.is_scheduled
