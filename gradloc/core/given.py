# SPDX-License-Identifier: Apache-2.0
"""What a step tells without a forward, because its loss can be computed of given log-probs: for any trainer's step.

Nothing here communicates: one rank may ask alone.
"""

from typing import Protocol

import torch

from .probe import Recorded

__all__ = ["LossOfGiven"]


class LossOfGiven(Protocol):
    """A part of :class:`~.probe.TrainingStep`, from the loss of given log-probs."""

    dp_size: int
    """Data-parallel ranks, over whose losses the gradient is averaged."""

    @property
    def loss_scale(self) -> float:
        """See :class:`~.probe.TrainingStep`."""

    def recorded(self, micro_batch: int) -> Recorded:
        """See :class:`~.probe.TrainingStep`."""

    def has_kl_term(self) -> bool:
        """Whether the loss has one."""

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        """This rank's loss, before any scaling, with these log-probs (B, T) in the place of a forward's."""

    def leaf(self, micro_batch: int) -> torch.Tensor:
        """The recorded log-probs (B, T) in float32, to be differentiated by."""
        return self.recorded(micro_batch).log_prob.detach().float().clone().requires_grad_()

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`~.probe.TrainingStep`: a coefficient is of this rank's own (scaled) loss, the step's gradient is
        the mean over the ranks."""
        recorded, factor = self.recorded(micro_batch), 1.0 / (self.dp_size * self.loss_scale)
        found, entropy = recorded.log_prob_coefficient, recorded.entropy_coefficient
        log_prob = torch.zeros_like(recorded.log_prob) if found is None else found * factor
        return log_prob, None if entropy is None else entropy * factor

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """See :class:`~.probe.TrainingStep`: of the loss with the term less that of the loss without."""
        if not self.has_kl_term():
            return None
        derivatives: list[torch.Tensor] = []
        for is_without in (False, True):
            log_prob = self.leaf(micro_batch)
            loss = self.loss_of_given(micro_batch, log_prob, is_without)
            derivatives += torch.autograd.grad(loss, log_prob)
        return derivatives[0] - derivatives[1]

    def has_finite_loss(self, micro_batch: int) -> bool:
        """See :class:`~.probe.TrainingStep`."""
        log_prob = self.leaf(micro_batch)
        loss = self.loss_of_given(micro_batch, log_prob)
        (coefficients,) = torch.autograd.grad(loss, log_prob)
        return bool(torch.isfinite(loss) and torch.isfinite(coefficients).all())
