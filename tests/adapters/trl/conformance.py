# SPDX-License-Identifier: Apache-2.0
"""The conformance suite's harness on TRL's GRPOTrainer: builds a trainer, updates it on a batch and reads it.

Scenarios of `tests.world` speak verl 0.7's names of settings; an update is one window of TRL's real `training_step`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset

from gradloc.adapters.trl.step import OTHER_KEY, TrlStep
from gradloc.adapters.trl.trainer import WatchedRewards
from gradloc.adapters.trl.watch import other_advantages
from tests.adapters.trl.harness import PROMPTS, tokenizer, vowels
from tests.detached import let_through
from tests.world.harness import NUM_PROMPT, Decoder, hash_weights, model_of
from tests.world.oracle import MicroBatch, plain_outputs

ACTOR = "actor_rollout_ref.actor."
LOSSES = {"token-mean": "dapo", "seq-mean-token-sum": "luspo", "seq-mean-token-mean": "grpo"}


PLAIN = ("beta", "delta", "entropy_coef", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type")
PLAIN += ("off_policy_mask_threshold", "scale_rewards")
PLAIN += ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_mode")
"""TRL's own settings, which a scenario may name as they are."""


def step_class() -> type:
    """The adapter's step, which the search replays."""
    return TrlStep


@dataclass
class Rows:
    """Where verl has its DataProto."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompts = self.batch["input_ids"][:, :NUM_PROMPT]
        prompts[1::2] = prompts[::2]  # TRL knows siblings by their prompt

    def __len__(self) -> int:
        return len(self.batch["responses"])


class Fed(trl.GRPOTrainer):
    """Trains on what it is given; ``let_out`` (row ids, position) flow nothing back."""

    let_out: list[tuple[torch.Tensor, int]] = []

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.present = inputs
        return inputs

    def _get_per_token_logps_and_entropies(self, *args: Any, **given: Any) -> Any:
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **given)
        if not self.let_out or not log_probs.requires_grad:
            return log_probs, entropies, aux_loss
        kept = torch.ones_like(log_probs, dtype=torch.bool)
        for ids, position in self.let_out:
            kept[(self.present["completion_ids"] == ids).all(1), position] = False
        return let_through(kept, log_probs), let_through(kept, entropies), aux_loss


class WatchedFed(WatchedRewards, Fed):
    """With GradLoc."""


class Trainer:
    """One rank's view of a trainer, with what the scenarios use."""

    scaler = None
    global_steps = 0

    def __init__(self, trainer: Any, rows: int):
        self.trainer, self.rows = trainer, rows
        trainer.create_optimizer()
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped.train()

    module = property(lambda self: self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped))
    optimizer = property(lambda self: self.trainer.optimizer.optimizer)
    dp_size = property(lambda self: dist.get_world_size())
    clips_in = property(lambda self: (self, "clip"))
    driver = property(lambda self: self.trainer._watch.driver)

    def clip(self) -> Any:
        return self.trainer._clip_grad_norm(self.trainer.model_wrapped)

    def update(self, batch: Rows) -> dict[str, Any]:
        """One optimizer step on the whole batch; its metrics and events, on every rank."""
        trainer, model = self.trainer, self.trainer.model_wrapped
        mine = [inputs for rank, _, inputs in self._dealt(batch) if rank == dist.get_rank()]
        trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = len(mine)
        trainer.state.global_step = self.global_steps
        self.global_steps += 1
        for number, inputs in enumerate(mine, 1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(mine))
            within = contextlib.nullcontext() if number == len(mine) else trainer.accelerator.no_sync(model)
            with within:
                trainer.training_step(model, inputs, None)
        events: list[Any] = []
        if hasattr(trainer, "_watch"):
            look = trainer._watch.localizer.report
            told = mock.patch.object(trainer._watch.localizer, "report", lambda: events_of(look(), events))
        else:
            told = contextlib.nullcontext()
        with told:
            norm = trainer._get_grad_norm(model, grad_norm=self.clip())
        if norm.isfinite():  # which verl asks and TRL does not
            trainer.optimizer.step()
        model.zero_grad()
        trainer._metrics["train"].clear()
        metrics = trainer._watch.take_metrics() if hasattr(trainer, "_watch") else {}
        box = [metrics, events]
        dist.broadcast_object_list(box, src=0)
        found = {name: [[value]] if name.startswith("actor/") else [value] for name, value in box[0].items()}
        return {"metrics": {**found, "actor/grad_norm": [[float(norm)]]}, "events": box[1]}

    def weights_hash(self) -> str:
        return hash_weights(self.module, self.trainer.optimizer.optimizer)

    def _dealt(self, batch: Rows) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Rank, number and TRL's inputs of each micro-batch, as verl deals rows out."""
        tensors, each = batch.batch, len(batch) // self.dp_size
        num_items = tensors["response_mask"].sum().float()
        scores, is_divided = tensors["token_level_scores"].sum(-1), self.trainer.scale_rewards == "group"
        present, other = (other_advantages(scores, 2, each) for each in (not is_divided, is_divided))
        is_of_rewards = bool((present[:, None] * tensors["response_mask"]).allclose(tensors["advantages"]))
        for rank in range(self.dp_size):
            for index, first in enumerate(range(rank * each, (rank + 1) * each, self.rows)):
                rows = {name: value[first : first + self.rows] for name, value in tensors.items()}
                of_engine = {"old_per_token_logps": "old_log_probs", "sampling_per_token_logps": "rollout_log_probs"}
                has_them = "rollout_log_probs" in rows
                if "rollout_is_weights" in rows:  # as vLLM's rollouts have them
                    self.trainer.use_vllm, rows["importance_sampling_ratio"] = True, rows["rollout_is_weights"]
                reference = {"ref_per_token_logps": rows["ref_log_prob"]} if self.trainer.beta else {}
                yield (
                    rank,
                    index,
                    {
                        "prompt_ids": rows["input_ids"][:, :NUM_PROMPT],
                        "prompt_mask": rows["attention_mask"][:, :NUM_PROMPT],
                        "completion_ids": rows["responses"],
                        "completion_mask": rows["attention_mask"][:, NUM_PROMPT:],
                        "tool_mask": rows["response_mask"],
                        "advantages": rows["advantages"],
                        "num_items_in_batch": num_items,
                        **reference,
                        **{name: rows[name] for name in ("importance_sampling_ratio",) if name in rows},
                        **({theirs: rows[ours] for theirs, ours in of_engine.items()} if has_them else {}),
                        **({OTHER_KEY: other[first : first + self.rows]} if is_of_rewards else {}),
                    },
                )

    def micro_batches(self, model: torch.nn.Module, batch: Rows) -> Iterator[MicroBatch]:
        """The oracle's: the mean over all tokens of PPO's loss, of a plain model's log-probs."""
        for rank, index, inputs in self._dealt(batch):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            log_prob, _ = plain_outputs(model, ids, attention, inputs["completion_ids"].shape[1])
            mask, factor = inputs["tool_mask"], self.dp_size / inputs["num_items_in_batch"]

            def loss(now: torch.Tensor, entropy: Any, a=inputs["advantages"], m=mask, f=factor) -> torch.Tensor:
                ratio = (now - now.detach()).exp()
                return -(torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * m).sum() * f

            yield MicroBatch(rank, index, mask, log_prob, None, loss)


def events_of(report: Any, events: list[Any]) -> Any:
    events += [asdict(raw.event) for raw in report.events]
    return report


def make_trainer(
    overrides: list[str], dump_dir: str, dropout: float = 0.0, model: torch.nn.Module | None = None
) -> Trainer:
    """A trainer on this world's ranks; TRL's own where spike_detection is off."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = dict(override.removeprefix(ACTOR).split("=", 1) for override in overrides if "=" in override)
    rows = int(given.get("ppo_micro_batch_size_per_gpu", 4))
    config: dict[str, Any] = {
        "output_dir": dump_dir,
        "max_grad_norm": float(given.get("grad_clip", 1.0)),
        "entropy_coef": float(given.get("entropy_coeff", 0.0)),
        "loss_type": LOSSES[given.get("loss_agg_mode", "token-mean")],
        "bf16": given.get("fsdp_config.dtype") == "bfloat16",
        "vllm_importance_sampling_mode": "token_truncate",
        "scale_rewards": "none" if given.get("algorithm.norm_adv_by_std_in_grpo") == "false" else "group",
    }
    names = {"clip_ratio_low": "epsilon", "clip_ratio_high": "epsilon_high", "kl_loss_coef": "beta"}
    config |= {theirs: float(given[ours]) for ours, theirs in names.items() if ours in given}
    config |= {name: _value(text.strip("\"'")) for name, text in given.items() if name in PLAIN}
    if given.get("policy_loss.loss_mode") == "gspo":
        config["importance_sampling_level"] = "sequence"
    beta = config.pop("beta", 0.0)
    args = trl.GRPOConfig(
        per_device_train_batch_size=rows, num_generations=2, learning_rate=1e-3, max_steps=100, report_to="none",
        use_cpu=True, gradient_checkpointing=False, weight_decay=0.01, **config,
    )  # fmt: skip
    is_on = given.get("spike_detection", "").lower() == "true"
    more = {"gradloc": {"dump_dir": dump_dir, **_settings(given)}} if is_on else {}
    data = Dataset.from_dict({"prompt": PROMPTS})
    model = model_of(overrides, dropout) if model is None else model
    kind = WatchedFed if is_on else Fed
    made = kind(model, vowels, args=args, train_dataset=data, processing_class=tokenizer(), **more)
    if is_on and made._watch.driver is not None:
        made._watch.driver.writer.tokenizer = made._watch.driver.writer.tokenizer and Decoder()
    made.beta = beta  # now, since TRL loads a reference model where its config has it: the batch has the log-probs
    torch.manual_seed(1000)
    return Trainer(made, rows)


def _settings(given: dict[str, str]) -> dict[str, Any]:
    """Ours, from verl's names."""
    published = {"grad_norm_threshold": "gradloc.trigger.tau", "bisect_budget_steps": "gradloc.budget"}
    found: dict[str, Any] = {}
    for name, text in given.items():
        name = published.get(name, name)
        if not name.startswith("gradloc."):
            continue
        *blocks, key = name.removeprefix("gradloc.").split(".")
        inner = found
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[key] = _value(text.strip("'"))
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


@contextlib.contextmanager
def letting_out(plants: list[tuple[int, int, float]], batch: Rows) -> Iterator[None]:
    """Make plain training detach the planted tokens in its own forward."""
    targets = [(batch.batch["responses"][row], position) for row, position, _ in plants]
    with mock.patch.object(Fed, "let_out", targets):
        yield
