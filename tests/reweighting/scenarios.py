# SPDX-License-Identifier: Apache-2.0
"""What every rank runs together: the two stages beside the ordinary update, by gradient."""

from typing import Any

import torch

from tests.world.harness import log_probs, make_batch, make_trainer, part
from tests.world.spikes import address, plant

ALGORITHM = "algorithm.lopti.enable=true"


def formulas(log_prob: list, mask: list, advantages: list, calls: list[dict]) -> list[Any]:
    """The pure functions on plain lists, one answer per call."""
    ours = part("reweighting")
    log_prob, mask = torch.tensor(log_prob), torch.tensor(mask)
    answers: list[Any] = []
    for call in calls:
        if "alpha" in call:
            answers.append(ours.reweight(torch.tensor(advantages), log_prob, call["alpha"]).tolist())
        else:
            stages = ours.split(log_prob, mask, ours.LoptiConfig(enable=True, **call))
            answers.append([[stage.name, stage.mask.tolist()] for stage in stages])
    return answers


def batch_of(seed: int, trainer: Any = None) -> Any:
    """A batch whose old probabilities spread over (0, 1), or are the trainer's own."""
    batch = make_batch(seed=seed)
    if trainer is None:
        generator = torch.Generator().manual_seed(seed)
        shape = batch.batch["old_log_probs"].shape
        batch.batch["old_log_probs"] = -3 * torch.rand(shape, generator=generator)
        return batch
    batch.batch["old_log_probs"] = log_probs(trainer, batch, micro_batch_size=4)
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
    found = {}
    for name, extra in (("ordinary", []), ("lopti", [ALGORITHM])):
        trainer = make_trainer(overrides + frozen + extra, dump_dir)
        batch = batch_of(3, trainer if uses_own_probs else None)
        before = {key: value.clone() for key, value in batch.batch.items()}
        steps = recorded_steps(trainer)
        out = trainer.update(batch)
        found[name] = [steps, batch, before, out]
    ordinary, (steps, batch, before, out) = found["ordinary"][0], found["lopti"]
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
        "metrics": out["metrics"],
        "ordinary_metrics": found["ordinary"][3]["metrics"],
    }


def recorded_steps(trainer: Any) -> list[torch.Tensor]:
    """Will hold the whole gradient of each optimizer step, as one vector of this rank's shards."""
    steps: list[torch.Tensor] = []
    owner, name = trainer.steps_in

    def step() -> Any:
        parts = []
        for param in trainer.module.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            parts.append(local.detach().flatten().double().clone())
        steps.append(torch.cat(parts))
        return getattr(type(owner), name)(owner)  # on verl 0.9 another class with the first update

    setattr(owner, name, step)
    return steps


def train(overrides: list[str], dump_dir: str, num_steps: int = 3) -> dict[str, Any]:
    """A few updates; weights, norms and the metrics of the last."""
    trainer = make_trainer(overrides, dump_dir, dropout=0.1)
    norms = []
    for seed in range(num_steps):
        out = trainer.update(make_batch(seed=seed))
        norms.append(out["metrics"]["actor/grad_norm"])
    state = torch.get_rng_state()
    return {
        "weights": trainer.weights_hash(),
        "norms": norms,
        "rng": state.numpy().tobytes(),
        "metrics": {name: value for name, value in out["metrics"].items() if "perf/" not in name},
    }


def by_hand(dump_dir: str, eta: float) -> dict[str, Any]:
    """Lopti through the hook, and the same two updates called one after the other by hand."""
    settings = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    ours = make_trainer([*settings, ALGORITHM, f"algorithm.lopti.eta={eta}"], dump_dir)
    ours.update(batch_of(5))
    plain = make_trainer(settings, dump_dir)
    batch = batch_of(5)
    mask = batch.batch["response_mask"].float()
    prob, advantages = batch.batch["old_log_probs"].exp(), batch.batch["advantages"]
    low = torch.zeros_like(mask)
    for row in range(len(mask)):
        for position in range(mask.shape[1]):
            if mask[row, position] == 1 and prob[row, position] < abs(eta):
                low[row, position] = 1
    stages = [("low", low), ("high", mask - low)]
    for name, stage in stages if eta > 0 else stages[::-1]:
        batch.batch["advantages"] = advantages * stage
        plain.update_by_hand(batch, stage, name)
    return {"ours": ours.weights_hash(), "by_hand": plain.weights_hash()}


def spike_in_a_stage(dump_dir: str, is_low: bool) -> dict[str, Any]:
    """A spike planted among the low- or the high-probability tokens, with the localizer on."""
    on = ["actor_rollout_ref.actor.spike_detection=true", "actor_rollout_ref.actor.grad_norm_threshold=640"]
    trainer = make_trainer([*on, ALGORITHM], dump_dir)
    batch = batch_of(1)
    prob = batch.batch["old_log_probs"].exp()
    mask = batch.batch["response_mask"].bool()
    wanted = mask & ((prob < 0.3) if is_low else (prob > 0.7))
    row, position = wanted.nonzero()[3].tolist()
    plant(batch, row, position, 1e5)
    out = trainer.update(batch)
    return {
        "planted": (row, position),
        "events": [
            {"found": address(e), "stage": e["step"]["stage"], "verdict": e["certificate"]["verdict"]}
            for e in out["events"]
        ],
        "metrics": out["metrics"],
        "histories": sorted(trainer.driver.state()["histories"]),
    }


def spikes_by_history(dump_dir: str) -> dict[str, Any]:
    """Thresholds that each stage's own history makes."""
    trainer = make_trainer(["actor_rollout_ref.actor.spike_detection=true", ALGORITHM], dump_dir)
    for seed in range(4):
        trainer.update(batch_of(seed))
    return {
        stage: [history["positions"], sum(len(position["log_norms"]) for position in history["positions"])]
        for stage, history in trainer.driver.state()["histories"].items()
    }


def learned_by_stage(dump_dir: str) -> dict[str, Any]:
    """What the stabilizers have learned of each stage after three updates, for the checkpoint."""
    stabilize = "actor_rollout_ref.actor.gradloc.stabilize"
    on = [f"{stabilize}.layer_clip.rule=adagc", f"{stabilize}.skip_step.enable=true"]
    trainer = make_trainer([*on, ALGORITHM], dump_dir)
    for seed in range(3):
        out = trainer.update(batch_of(seed))
    norms = {stage: out["metrics"][f"lopti/{stage}/grad_norm"][0] for stage in ("low", "high")}
    return {"state": trainer.hook.stabilizers.state(), "last_norms": norms}


def spikes_in_both_stages(dump_dir: str, max_events: int) -> list[str]:
    """The stages whose spikes were localized, in a step that has one in each."""
    trainer = make_trainer(
        [
            "actor_rollout_ref.actor.spike_detection=true",
            "actor_rollout_ref.actor.grad_norm_threshold=640",
            f"actor_rollout_ref.actor.gradloc.trigger.max_events_per_step={max_events}",
            ALGORITHM,
        ],
        dump_dir,
    )
    batch = batch_of(1)
    prob, mask = batch.batch["old_log_probs"].exp(), batch.batch["response_mask"].bool()
    for wanted in (mask & (prob < 0.3), mask & (prob > 0.7)):
        plant(batch, *wanted.nonzero()[3].tolist(), 1e5)
    return [event["step"]["stage"] for event in trainer.update(batch)["events"]]
