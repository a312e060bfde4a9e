# SPDX-License-Identifier: Apache-2.0
"""A tiny critic under verl's own code, on either verl, and a return that no value explains; runs inside a rank."""

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.world import trainer_folder
from tests.world.harness import NUM_PROMPT, make_batch, model_config
from tests.world.settings import require

ACTOR = "actor_rollout_ref.actor"
RUN_BY = {"verl07": "critic_worker", "verl09": "critic_engine"}
SIZE = 8
PLACE = (6, 2)
"""Row and response position of what is planted."""
SETTINGS = [
    "algorithm.adv_estimator=gae",
    "critic.strategy=fsdp2",
    f"critic.ppo_mini_batch_size={SIZE}",
    "critic.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_epochs=1",
    "critic.use_dynamic_bsz=false",
    "critic.loss_agg_mode=seq-mean-token-mean",
    "critic.optim.lr=1e-3",
    "critic.model.enable_gradient_checkpointing=false",
    "critic.model.use_remove_padding=false",
]


def make_critic() -> torch.nn.Module:
    """A random Qwen3 that puts out one number for each token."""
    from transformers import Qwen3ForTokenClassification

    torch.manual_seed(0)
    config = model_config()
    config.num_labels, config.classifier_dropout = 1, 0.0  # as verl sets them
    return Qwen3ForTokenClassification(config)


def make_values(target: float, value: float | None = None) -> Any:
    """`make_batch` as after the values: they and the returns, one of which is ``target``; of its place the value."""
    batch = make_batch(num_rows=SIZE)
    shape = batch.batch["responses"].shape
    generator = torch.Generator().manual_seed(5)
    batch.batch["values"] = 0.1 * torch.randn(shape, generator=generator)
    batch.batch["returns"] = batch.batch["values"] + torch.randn(shape, generator=generator)
    batch.batch["returns"][PLACE] = target
    if value is not None:
        batch.batch["values"][PLACE] = value
    return batch


def train(
    overrides: list[str], dump_dir: str, target: float, lets_out: bool = False, value: float | None = None
) -> dict[str, Any]:
    """One update of the critic; what it leaves behind, and what it should have.

    ``lets_out``: verl's own loss is made to detach the planted token's value. ``value``: what it was before.
    """
    batch = make_values(target, value)
    folder = f"{dump_dir}-critic"
    if dist.get_rank() == 0 and not Path(folder).exists():
        make_critic().save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(1000)
    require(trainer_folder() in RUN_BY, "it has no critic")
    run_by = importlib.import_module(f"tests.world.models.{RUN_BY[trainer_folder()]}")
    losses = run_by.losses
    settings = [*SETTINGS, f"{ACTOR}.gradloc.dump_dir={dump_dir}", *overrides]
    original = losses.compute_value_loss

    def of_the_others(vpreds: torch.Tensor, returns: torch.Tensor, **given: Any) -> Any:
        return original(vpreds=torch.where(returns == target, vpreds.detach(), vpreds), returns=returns, **given)

    with mock.patch.object(losses, "compute_value_loss", of_the_others if lets_out else original):
        found = run_by.update(settings, folder, batch)
    return {**found, "rng": torch.get_rng_state().numpy().tobytes(), **oracle(batch)}


def own_loss(overrides: list[str], dump_dir: str, target: float, other: float) -> dict[str, Any]:
    """The step's own loss asked of another return, beside the record that training on that one leaves; and whether the
    norm was noted after each backward that sums the gradient."""
    from tests.world.identities import instead_of_localizing

    def records(step: Any, returns: torch.Tensor | None) -> list[torch.Tensor]:
        found = []
        for index in range(step.num_micro_batches):
            tensors = {} if returns is None else {"returns": returns[step.rows(index)]}
            recorded = step.recorded(index) if returns is None else step.recorded_under(index, {}, tensors)
            found.append(recorded.log_prob_coefficient)
        return found

    def measured(target: float, *asked: torch.Tensor | None) -> list[list[torch.Tensor]]:
        with instead_of_localizing(lambda hook, *_: [records(hook._step, of) for of in asked]) as results:
            train(overrides, dump_dir, target)
        return results[0]

    def noted(hook: Any, *_: Any) -> bool:
        return len(hook._tracker._running) == (1 if hook._step.reduces_once else hook._step.num_micro_batches)

    with instead_of_localizing(noted) as is_noted:
        train(overrides, dump_dir, target)
    own = make_values(target).batch["returns"]
    ((wanted,), (left, same, found)) = (
        measured(other, None),
        measured(target, None, own, make_values(other).batch["returns"]),
    )
    pairs = {"own": (same, left), "other": (found, wanted), "unlike": (left, wanted)}
    found = {name: all(torch.equal(*pair) for pair in zip(*both, strict=True)) for name, both in pairs.items()}
    return {**found, "noted": is_noted == [True]}


def oracle(batch: Any) -> dict[str, float]:
    """Norms of the gradient, of the planted token's part and of the rest, by three backwards of a plain model."""
    model, mask = make_critic(), batch.batch["response_mask"].bool()
    inputs = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    planted = torch.zeros_like(mask)
    planted[PLACE] = True
    norms = []
    for part in (mask, planted, mask & ~planted):
        values = model(**inputs).logits.squeeze(-1)[:, NUM_PROMPT - 1 : -1]
        values = torch.where(part, values, values.detach())
        old, returns = batch.batch["values"], batch.batch["returns"]
        clipped = torch.clamp(values, old - 0.5, old + 0.5)
        losses = torch.max((values - returns) ** 2, (clipped - returns) ** 2) * mask
        (0.5 * (losses.sum(1) / mask.sum(1)).mean()).backward()
        norms.append(float(torch.cat([param.grad.flatten() for param in model.parameters()]).norm()))
        model.zero_grad()
    return dict(zip(("norm", "culprit_norm", "norm_without"), norms, strict=True))
