# SPDX-License-Identifier: Apache-2.0
"""Compare the two stages with the ordinary update, by gradient; every rank runs this together."""

from typing import Any

import torch

from tests.world.harness import local_of, make_batch, make_trainer
from tests.world.spikes import address, plant

ALGORITHM = "algorithm.lopti.enable=true"


def batch_of(seed: int, trainer: Any = None) -> Any:
    """A batch whose old probabilities spread over (0, 1), or are the trainer's own."""
    batch = make_batch(seed=seed)
    if trainer is None:
        generator = torch.Generator().manual_seed(seed)
        shape = batch.batch["old_log_probs"].shape
        batch.batch["old_log_probs"] = -3 * torch.rand(shape, generator=generator)
        return batch
    batch.batch["old_log_probs"] = trainer.log_probs(batch)
    return batch


def stage_gradients(overrides: list[str], dump_dir: str, uses_own_probs: bool = False) -> dict[str, Any]:
    """The gradient of each optimizer step of a frozen actor: ordinary, and in Lopti's stages.

    Returns:
        ``error``: the largest relative distance of a mini-batch's ordinary gradient from the sum of
        its stages'; ``norms`` of both stages, first mini-batch; ``order``; ``batch_is_intact``.
    """
    # a weight decay or a learning rate would move the weights between the stages
    frozen = [
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.grad_clip=1e9",
    ]
    found = []
    for extra in ([], [ALGORITHM]):
        trainer = make_trainer(overrides + frozen + extra, dump_dir)
        batch = batch_of(3, trainer if uses_own_probs else None)
        before = {key: value.clone() for key, value in batch.batch.items()}
        found.append((recorded_steps(trainer), trainer.update(batch)["metrics"]))
    (ordinary, ordinary_metrics), (steps, metrics) = found
    num_mini = len(ordinary)
    errors = [
        float((first + second - whole).norm() / whole.norm())
        for whole, first, second in zip(ordinary, steps[:num_mini], steps[num_mini:], strict=True)
    ]
    return {
        "error": max(errors),
        "norms": (float(steps[0].norm()), float(steps[num_mini].norm())),
        "batch_is_intact": all(torch.equal(batch.batch[key], before[key]) for key in before)
        and set(batch.batch.keys()) == set(before),
        "metrics": metrics,
        "ordinary_metrics": ordinary_metrics,
    }


def recorded_steps(trainer: Any) -> list[torch.Tensor]:
    """Will hold the whole gradient of each optimizer step, as one vector of this rank's shards."""
    steps: list[torch.Tensor] = []
    owner, name = trainer.steps_in

    def step() -> Any:
        parts = []
        for param in trainer.module.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            parts.append(local_of(grad).flatten().double().clone())
        steps.append(torch.cat(parts))
        return getattr(type(owner), name)(owner)  # on verl 0.9 another class with the first update

    setattr(owner, name, step)
    return steps


def by_hand(dump_dir: str, eta: float) -> dict[str, Any]:
    """Lopti through the hook, and the same two updates called one after the other by hand."""
    settings = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    ours = make_trainer([*settings, ALGORITHM, f"algorithm.lopti.eta={eta}"], dump_dir)
    ours.update(batch_of(5))
    plain = make_trainer(settings, dump_dir)
    batch = batch_of(5)
    mask = batch.batch["response_mask"].float()
    prob, advantages = batch.batch["old_log_probs"].exp(), batch.batch["advantages"]
    low = mask * (prob < abs(eta))
    stages = [("low", low), ("high", mask - low)]
    for name, stage in stages if eta > 0 else stages[::-1]:
        batch.batch["advantages"] = advantages * stage
        plain.update_by_hand(batch, stage, name)
    return {"ours": ours.weights_hash(), "by_hand": plain.weights_hash()}


def spike(dump_dir: str, stage: str) -> dict[str, Any]:
    """A spike planted among the low- or the high-probability tokens, with the localizer on."""
    actor = "actor_rollout_ref.actor"
    on = [f"{actor}.spike_detection=true", f"{actor}.grad_norm_threshold=640"]
    trainer, batch = make_trainer([*on, ALGORITHM], dump_dir), batch_of(1)
    prob, mask = batch.batch["old_log_probs"].exp(), batch.batch["response_mask"].bool()
    planted = tuple((mask & (prob < 0.3 if stage == "low" else prob > 0.7)).nonzero()[3].tolist())
    plant(batch, *planted, 1e5)
    out = trainer.update(batch)
    return {
        "planted": planted,
        "events": [(address(e), e["step"]["stage"], e["certificate"]["verdict"]) for e in out["events"]],
        "metrics": out["metrics"],
    }


def rates(each_stage: str, dump_dir: str) -> list[float]:
    """The learning rate after each of two steps and an analysis; its schedule divides by the number of its steps."""
    from tests.analysis.scenarios import requested

    trainer = make_trainer([ALGORITHM, f"algorithm.lopti.step_lr_each_stage={each_stage}"], dump_dir)
    trainer.schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))
    (before,), found = trainer.schedule.base_lrs, []
    for seed in range(2):
        trainer.update(batch_of(seed))
        found.append(trainer.schedule.get_last_lr()[0] / before)
    trainer.analyze(requested("buckets", batch_of(2)))
    trainer.worker.actor_lr_scheduler.step()
    return [*found, trainer.worker.actor_lr_scheduler.get_last_lr()[0] / before]
