# SPDX-License-Identifier: Apache-2.0
"""Scenarios on verl's real actor, whose gradients are gathered whole; they run inside a rank."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.stabilize import slow
from tests.world.harness import local_of, make_batch, make_trainer
from tests.world.spikes import plant


def gather(trainer: Any) -> dict[str, list[float]]:
    """The whole gradient in ``.grad`` over all ranks: parameter name -> plain list."""
    gathered = {}
    for name, param in trainer.module.named_parameters():
        mine = None if param.grad is None else local_of(param.grad).flatten().clone()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        parts = [part for part in parts if part is not None]
        gathered[name] = torch.cat(parts).tolist() if parts else []
    return gathered


def group_of(name: str, group: str) -> str:
    """By the names of this model alone, with nothing of the code under test."""
    name = name.replace("_fsdp_wrapped_module.", "")
    if group == "tensor":
        return name
    parts = name.split(".")
    if group == "layer" and "layers" in parts:
        return f"layer {parts[parts.index('layers') + 1]}"
    if name.endswith("_flat_param"):
        return "mixed"
    for kind, mark in (("attention", "self_attn"), ("mlp", "mlp"), ("head", "lm_head")):
        if mark in parts:
            inner = parts[-2]
            return "norm" if inner in ("q_norm", "k_norm") else kind
    return "embedding" if "embed_tokens" in parts else "norm"


def watch(trainer: Any) -> list[dict[str, Any]]:
    """Note the whole gradient of every step, before anything is clipped and as the optimizer gets it."""
    seen: list[dict[str, Any]] = []
    owner, name = trainer.steps_in
    step = trainer.optimizer.step

    def all_watched():
        seen.append({"before": gather(trainer)})
        return getattr(type(owner), name)(owner)  # on verl 0.9 another class with the first update

    def step_watched(*args, **kwargs):
        seen[-1]["after"] = gather(trainer)
        return step(*args, **kwargs)

    setattr(owner, name, all_watched)
    trainer.optimizer.step = step_watched
    return seen


def norms_of(gradient: dict[str, list[float]], group: str) -> dict[str, float]:
    """Norm per group, by plain loops."""
    values: dict[str, list[float]] = {}
    for name, part in gradient.items():
        values.setdefault(group_of(name, group), []).extend(part)
    return {key: math.hypot(*part) for key, part in values.items()}


def clip_as_the_slow_version(
    overrides: list[str], dump_dir: str, group: str, rule: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Real gradients over some steps, some with a culprit; the optimizer's gradient held against
    the whole gradient clipped by plain loops."""
    trainer = make_trainer(overrides, dump_dir)
    seen = watch(trainer)
    reported = []
    for seed in range(8):
        batch = make_batch(seed=seed)
        if seed in (5, 7):
            plant(batch, 6, 2, 300.0)
        metrics = trainer.update(batch)["metrics"]
        reported.append({key: values[0] for key, values in metrics.items()})
    norms = [norms_of(step["before"], group) for step in seen]
    factors = getattr(slow, rule)(norms, grad_clip=trainer.grad_clip, **settings)
    worst, untouched = 0.0, []
    for step, of_step in zip(seen, factors, strict=True):
        for name, part in step["before"].items():
            factor = of_step[group_of(name, group)]
            if factor == 1.0:
                untouched.append(part == step["after"][name])
            for value, found in zip(part, step["after"][name], strict=True):
                worst = max(worst, abs(found - factor * value) / (abs(factor * value) + 1e-8))
    return {
        "worst": worst,
        "untouched": untouched,
        "factors": [list(of_step.values()) for of_step in factors],
        "norms": [math.hypot(*of_step.values()) for of_step in norms],
        "after": [math.hypot(*norms_of(step["after"], group).values()) for step in seen],
        "metrics": reported,
    }


def learn(kinds: list[str], overrides: list[str], dump_dir: str) -> list[dict[str, Any]]:
    """One update per kind of batch, ``healthy`` or ``spike``; what each one taught."""
    trainer = make_trainer(overrides, dump_dir)
    answers = []
    for seed, kind in enumerate(kinds):
        batch = make_batch(seed=seed)
        if kind == "spike":
            plant(batch, 6, 2, 1e5)
        out = trainer.update(batch)
        answers.append(
            {
                "state": copy.deepcopy(trainer.hook.stabilizers.state()),
                "metrics": {key: values[0] for key, values in out["metrics"].items()},
                "actions": [event["action"]["taken"] for event in out["events"]],
                "weights": trainer.weights_hash(),
            }
        )
    return answers


def resume(overrides: list[str], dump_dir: str, num_steps: int, cut: int) -> dict[str, Any]:
    """Train, save at ``cut`` and go on; and go on from there in a new trainer."""
    whole = make_trainer(overrides, dump_dir)
    for seed in range(cut):
        update(whole, seed)
    folder = Path(f"{dump_dir}-checkpoint-rank{dist.get_rank()}")
    folder.mkdir(parents=True)
    whole.hook.save(str(folder))
    second = make_trainer(overrides, dump_dir)
    with torch.no_grad():
        for new, old in zip(second.module.parameters(), whole.module.parameters(), strict=True):
            local_of(new).copy_(local_of(old))
    second.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    second.hook.load(str(folder))
    norms = [update(whole, seed) for seed in range(cut, num_steps)]
    again = [update(second, seed) for seed in range(cut, num_steps)]
    return {
        "whole": (whole.weights_hash(), norms, whole.hook.stabilizers.state()),
        "resumed": (second.weights_hash(), again, second.hook.stabilizers.state()),
        "saved": json.loads((folder / "gradloc.json").read_text()),
    }


def update(trainer: Any, seed: int) -> dict[str, Any]:
    batch = make_batch(seed=seed, rollout_noise=0.5)
    if seed in (3, 6):
        plant(batch, 6, 2, 300.0)
    metrics = trainer.update(batch)["metrics"]
    # NaN is not equal to itself; what is compared here is whether the same was reported
    return {key: repr(value) for key, value in metrics.items() if "seconds" not in key and "perf/" not in key}


# ---- clips on ratios


def loss_under(overrides: list[str], layout: list[str], dump_dir: str) -> dict[str, Any]:
    """The real actor's update with clips on ratios, against verl's own with the slow weights.

    verl multiplies the token losses by ``rollout_is_weights``: the slow weights go in there.
    """
    batch = make_batch(rollout_noise=1.0)
    clipped = make_trainer(overrides + layout, dump_dir)
    stabilize = clipped.settings.stabilize
    out = clipped.update(copy.deepcopy(batch))
    plain = make_trainer(layout, dump_dir)
    log_prob = plain.log_probs(batch)
    log_ratio = (log_prob - batch.batch["rollout_log_probs"]).tolist()
    mask = batch.batch["response_mask"].tolist()
    weights = torch.ones_like(log_prob)
    for level, clip in (("token", stabilize.token_clip), ("geometric", stabilize.seq_clip)):
        if clip.mode != "off":
            weights *= torch.tensor(slow.token_weights(log_ratio, mask, level=level, **vars(clip)))
    batch.batch["rollout_is_weights"] = weights
    expected = plain.update(batch)
    return {
        "norm": out["metrics"]["actor/grad_norm"][0][0],
        "expected": expected["metrics"]["actor/grad_norm"][0][0],
        "unclipped": make_trainer(layout, dump_dir).update(make_batch())["metrics"]["actor/grad_norm"][0][0],
        "metrics": {key: values[0] for key, values in out["metrics"].items()},
        "num_changed": int((weights[batch.batch["response_mask"].bool()] != 1).sum()),
    }
