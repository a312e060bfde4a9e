# SPDX-License-Identifier: Apache-2.0
"""Find the log-ratio from which each of verl's losses has no finite gradient, on a token and on padding.

    python -m lab.benchmarks.losses                  # of the installed verl, as a Markdown table

verl's own function is called with a batch of two responses of eight tokens. The log-prob at one position is moved away
from the old one (for a KL term: the reference) in growing steps in both directions, with advantages of 1 and -1. The
loss and its gradient with respect to every log-prob are checked.
"""

import itertools
from collections.abc import Callable

import torch

from lab.output import table

LOG_RATIOS = (1.0, 5.0, 10.0, 20.0, 50.0, 88.0, 89.0, 100.0, 200.0, 1000.0)
"""float32's exp overflows beyond 88.7."""
KL_TERMS = ("kl", "abs", "mse", "low_var_kl")
ROWS, WIDTH = 2, 8
TOKEN, PADDING = (0, 2), (0, 6)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs, old log-probs, advantages, response mask), (B, T) each -> loss."""


def main() -> None:
    import verl

    print(f"verl {verl.__version__}\n\n{markdown()}")


def markdown() -> str:
    """Return the table for the installed verl."""
    lines = [["loss", "on a token", "largest gradient there", "on padding"]]
    for name, loss in {**policy_losses(), **kl_losses()}.items():
        (token, largest), (padding, _) = sweep(loss, TOKEN), sweep(loss, PADDING)
        lines.append([f"`{name}`", token, f"{largest:.2g}", padding])
    return table(lines)


def sweep(loss: Loss, place: tuple[int, int]) -> tuple[str, float]:
    """Move the log-prob at ``place`` away from the old one, and check the loss and its gradient.

    Returns:
        The smallest tried log-ratio from which one of them is not finite, in words, and the largest finite
        |d loss / d log_prob|, where a token's weight in the mean is 1 / 10.
    """
    is_loss_finite: dict[float, bool] = {}
    largest = 0.0
    for size, sign, advantage in itertools.product(LOG_RATIOS, (1, -1), (1.0, -1.0)):
        value, gradient = gradient_of(loss, place, sign * size, advantage)
        if gradient.isfinite().all() and value.isfinite():
            largest = max(largest, float(gradient.abs().max()))
        else:
            is_loss_finite[size] = is_loss_finite.get(size, False) or bool(value.isfinite())
    if not is_loss_finite:
        return "finite", largest
    first = min(is_loss_finite)
    what = "gradient not finite, loss finite" if is_loss_finite[first] else "not finite"
    return f"{what} from {first:g}", largest


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
