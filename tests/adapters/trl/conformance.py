# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer in the conformance suite: a step is one window of its real ``training_step``."""

import contextlib
from typing import Any
from unittest import mock

import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset

from gradloc.adapters.trl.step import OTHER_KEY
from gradloc.adapters.trl.trainer import GRPOTrainer
from gradloc.adapters.trl.watch import other_advantages
from tests.adapters.trl.harness import PROMPTS, SMALL, tokenizer, vowels
from tests.world.harness import NUM_PROMPT, HeldTrainer, LetOut, as_lists, model_of
from tests.world.settings import Given

STEP = "adapters.trl.step.TrlStep"
NAMES = {"advantages": "advantages", "response_mask": "tool_mask", "rollout_is_weights": "importance_sampling_ratio"}
NAMES |= {"old_log_probs": "old_per_token_logps", "ref_log_prob": "ref_per_token_logps"}
NAMES |= {"rollout_log_probs": "sampling_per_token_logps"}
"""TRL's names of the batch's tensors."""
LOSSES = {"token-mean": "dapo", "seq-mean-token-sum": "luspo", "seq-mean-token-mean": "grpo"}
SETTINGS = {
    "ppo_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "grad_clip": "max_grad_norm",
    "entropy_coeff": "entropy_coef",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "kl_loss_coef": "beta",
    "loss_agg_mode": ("loss_type", LOSSES),
    "policy_loss.loss_mode": ("importance_sampling_level", {"vanilla": "token", "gpg": "token", "gspo": "sequence"}),
    "fsdp_config.dtype": ("bf16", {"float32": False, "bfloat16": True}),
    "algorithm.norm_adv_by_std_in_grpo": ("scale_rewards", {True: "group", False: "none"}),
}
BASE = {**SMALL, "num_generations": 2, "max_steps": 100, "weight_decay": 0.01, "loss_type": "dapo"}
BASE["vllm_importance_sampling_mode"] = "token_truncate"
SO_ANYWAY = ("use_kl_loss", "ppo_epochs", "clip_ratio_c", "algorithm.adv_estimator", "fsdp_config.fsdp_size")


class Trainer(HeldTrainer):
    """One rank's trainer; its inputs are given."""

    has_logits = False

    def __init__(self, trainer: Any):
        self.trainer, self.rows_each = trainer, trainer.args.per_device_train_batch_size
        trainer._prepare_inputs = lambda inputs: inputs
        trainer.create_optimizer()
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped.train()

    module = property(lambda self: self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped))
    optimizer = property(lambda self: self.trainer.optimizer.optimizer)
    hook = property(lambda self: getattr(self.trainer, "_watch", None))
    driver = property(lambda self: self.hook.driver)
    clips_in = property(lambda self: (self.trainer, "_clip_grad_norm"))

    def run(self, batch: Any) -> dict[str, Any]:
        trainer, model, mine = self.trainer, self.trainer.model_wrapped, self.own_rows(batch)
        trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = len(mine)
        trainer.state.global_step = self.global_steps - 1
        for rows in mine:
            is_last = rows is mine[-1]
            trainer.accelerator.gradient_state._set_sync_gradients(is_last)
            with contextlib.nullcontext() if is_last else trainer.accelerator.no_sync(model):
                trainer.training_step(model, self.inputs(batch, rows), None)
        norm = trainer._get_grad_norm(model, grad_norm=trainer._clip_grad_norm(model))
        if norm.isfinite():  # which verl asks and TRL does not
            trainer.optimizer.step()
        model.zero_grad()
        trainer._metrics["train"].clear()
        return as_lists({"actor/grad_norm": float(norm), **(self.hook.take_metrics() if self.hook else {})})

    def inputs(self, batch: Any, rows: slice) -> dict[str, Any]:
        """Return TRL's inputs of these rows."""
        tensors, trainer = batch.batch, self.trainer
        needs = {"ref_log_prob": trainer.beta, "old_log_probs": "rollout_log_probs" in tensors}
        names = {ours: theirs for ours, theirs in NAMES.items() if ours in tensors and needs.get(ours, True)}
        found = {theirs: tensors[ours][rows] for ours, theirs in names.items()}
        found["num_items_in_batch"] = tensors["response_mask"].sum().float()
        for name, whole in {"ids": tensors["input_ids"], "mask": tensors["attention_mask"]}.items():
            found[f"prompt_{name}"], found[f"completion_{name}"] = whole[rows].tensor_split([NUM_PROMPT], 1)
        trainer.use_vllm = "rollout_is_weights" in tensors  # of vLLM's rollouts
        scores, is_divided = tensors["token_level_scores"].sum(-1), trainer.scale_rewards == "group"
        present, other = (other_advantages(scores, 2, each)[:, None] for each in (not is_divided, is_divided))
        if (present * tensors["response_mask"]).allclose(tensors["advantages"]):
            found[OTHER_KEY] = other[rows, 0]
        return found

    def loss(self, batch: Any, rows: slice, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        advantages, mask = batch.batch["advantages"][rows], batch.batch["response_mask"]
        losses = -(log_prob - log_prob.detach()).exp() * advantages  # no ratio is clipped at 1
        return (losses * mask[rows]).sum() * self.dp_size / mask.sum()

    def letting_out(self, let_out: LetOut) -> contextlib.AbstractContextManager[Any]:
        own = self.trainer._get_per_token_logps_and_entropies

        def others(model: Any, ids: torch.Tensor, *args: Any, **given: Any) -> Any:
            log_probs, entropies, *more = own(model, ids, *args, **given)
            return let_out(ids[:, NUM_PROMPT:], log_probs), let_out(ids[:, NUM_PROMPT:], entropies), *more

        return mock.patch.object(self.trainer, "_get_per_token_logps_and_entropies", others)


def make_trainer(overrides: list[str], dump_dir: str, dropout: float = 0.0, model: Any = None) -> Trainer:
    """Make a trainer on this world's ranks, TRL's own where GradLoc is off."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = Given(overrides)
    ours, config = given.take_gradloc(), BASE | given.take(SETTINGS)
    config |= given.take_own(trl.GRPOConfig.__dataclass_fields__)
    given.end(SO_ANYWAY)
    beta, model = config.pop("beta", 0.0), model_of(overrides, dropout) if model is None else model
    kind, more = (trl.GRPOTrainer, {}) if ours is None else (GRPOTrainer, {"gradloc": {"dump_dir": dump_dir, **ours}})
    args, data = trl.GRPOConfig(output_dir=dump_dir, **config), Dataset.from_dict({"prompt": PROMPTS})
    made = Trainer(kind(model, vowels, args=args, train_dataset=data, processing_class=tokenizer(), **more))
    made.trainer.beta = beta  # now, since TRL loads a reference model where its config has it: the batch has log-probs
    return made
