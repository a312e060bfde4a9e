# SPDX-License-Identifier: Apache-2.0
"""Tiny mixtures of experts, transformers' own."""

import torch

from tests.world.harness import make_batch, make_trainer, model_config


def make_experts(kind: str) -> torch.nn.Module:
    """A random model of four experts a layer, two of them active; its forward computes the routers' balancing loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = {"num_local_experts": 4, "intermediate_size": 32}
    if kind == "qwen3_moe":
        own = {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}  # as in the published ones
    plain = {
        name: value
        for name, value in model_config().to_diff_dict().items()
        if name not in ("model_type", "architectures", "transformers_version")
    }
    config = AutoConfig.for_model(kind, **{**plain, **own}, num_experts_per_tok=2, output_router_logits=True)
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config)


def closures(overrides: list[str], dump_dir: str, seeds: list[int]) -> list[float]:
    """Return the sums of a spike's shares, in a model whose experts' weights are four times the usual.

    Args:
        overrides: of verl's config.
        dump_dir: for events.
        seeds: each makes an update on a batch with one row's advantages 10,000 times too large.
    """
    actor = "actor_rollout_ref.actor"
    still = [f"{actor}.spike_detection=True", f"{actor}.optim.lr=0", "experts=qwen3_moe"]
    trainer = make_trainer([*still, *overrides], dump_dir)
    with torch.no_grad():
        for name, param in trainer.module.named_parameters():
            if ".mlp." in name:
                param.mul_(4)
    found = []
    for seed in seeds:
        batch = make_batch(seed=seed)
        batch.batch["advantages"][seed % len(batch)] *= 1e4
        (event,) = trainer.update(batch)["events"]
        found.append(event["shares"]["closure"])
    return found
