# SPDX-License-Identifier: Apache-2.0
"""Find the log-ratio from which each of verl's losses has no finite gradient, on a token and on padding.

    python -m lab.benchmarks.losses                  # of the installed verl, as a Markdown table

verl's own function is called with a batch of two responses of eight tokens. The log-prob at one position is moved away
from the old one (for a KL term: the reference) in growing steps in both directions, with advantages of 1 and -1. The
loss and its gradient with respect to every log-prob are checked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.output import table

LOG_RATIOS = (1.0, 5.0, 10.0, 20.0, 50.0, 88.0, 89.0, 100.0, 200.0, 1000.0)
"""float32's exp overflows beyond 88.7."""
KL_TERMS = ("kl", "abs", "mse", "low_var_kl")
ROWS, WIDTH = 2, 8
TOKEN, PADDING = (0, 2), (0, 6)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs, old log-probs, advantages, response mask), (B, T) each -> loss."""


@dataclass(frozen=True)
class Outcome:
    """The behavior of a loss at one position as the log-ratio grows."""

    first_bad: float | None
    """The smallest tried log-ratio with a loss or gradient that is not finite; None if there is none."""
    is_loss_finite: bool
    """Whether the loss was still finite there."""
    largest: float
    """Largest finite |d loss / d log_prob|; a token's weight in the mean is 1 / 10."""


def main() -> None:
    import verl

    print(f"verl {verl.__version__}\n\n{markdown()}")


def markdown() -> str:
    """Return the table for the installed verl."""
    lines = [["loss", "on a token", "largest gradient there", "on padding"]]
    for name, loss in {**policy_losses(), **kl_losses()}.items():
        token, padding = sweep(loss, TOKEN), sweep(loss, PADDING)
        lines.append([f"`{name}`", said(token), f"{token.largest:.2g}", said(padding)])
    return table(lines)


def said(outcome: Outcome) -> str:
    if outcome.first_bad is None:
        return "finite"
    what = "gradient not finite, loss finite" if outcome.is_loss_finite else "not finite"
    return f"{what} from {outcome.first_bad:g}"


def sweep(loss: Loss, place: tuple[int, int]) -> Outcome:
    """Move the log-prob at ``place`` away from the old one, and check the loss and its gradient."""
    bad: dict[float, bool] = {}
    largest = 0.0
    for size in LOG_RATIOS:
        for log_ratio in (size, -size):
            for advantage in (1.0, -1.0):
                value, gradient = gradient_of(loss, place, log_ratio, advantage)
                is_finite = bool(torch.isfinite(gradient).all())
                if is_finite and torch.isfinite(value):
                    largest = max(largest, float(gradient.abs().max()))
                else:
                    bad[size] = bad.get(size, False) or bool(torch.isfinite(value))
    first = min(bad, default=None)
    return Outcome(first, first is not None and bad[first], largest)


def gradient_of(
    loss: Loss, place: tuple[int, int], log_ratio: float, advantage: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and its gradient with respect to every log-prob (B, T)."""
    torch.manual_seed(0)  # clip_cov draws
    mask = (torch.arange(WIDTH) < 5).float().expand(ROWS, WIDTH)
    old = -2.0 - torch.rand(ROWS, WIDTH)
    log_prob = old.clone()
    if log_ratio > 0:
        old[place] -= log_ratio  # a log-prob is at most 0
    else:
        log_prob[place] += log_ratio
    log_prob.requires_grad_()
    advantages = torch.randn(ROWS, WIDTH) * mask
    advantages[place] = advantage * mask[place]
    value = loss(log_prob, old, advantages, mask)
    (gradient,) = torch.autograd.grad(value, log_prob)
    return value.detach(), gradient


def policy_losses() -> dict[str, Loss]:
    """Return verl's policy losses by name, with its actor's default settings, without the one that calls another."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    needed = {"dro_beta": 0.1} if "dro_beta" in PolicyLossConfig.__dataclass_fields__ else {}  # without a default
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**needed)
    )

    def of(function: Callable) -> Loss:
        def loss(log_prob, old, advantages, mask):
            given = {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}
            return function(**given, loss_agg_mode="token-mean", config=config)[0]

        return loss

    return {name: of(function) for name, function in POLICY_LOSS_REGISTRY.items() if name != "bypass_mode"}


def kl_losses() -> dict[str, Loss]:
    """Return the KL terms of ``kl_loss_type``; the old log-probs are the reference's."""
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    def of(kind: str) -> Loss:
        return lambda log_prob, old, advantages, mask: agg_loss(kl_penalty(log_prob, old, kind), mask, "token-mean")

    return {f"kl_loss_type={kind}": of(kind) for kind in KL_TERMS}


if __name__ == "__main__":
    main()
