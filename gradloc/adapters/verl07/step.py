# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's actor or critic that can be run again, by verl's own forward and backward."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.utils.device import get_device_id
from verl.utils.gradloc_seam import Off
from verl.utils.seqlen_balancing import prepare_dynamic_batch

from ...analysis.parts import BUCKET_KEY
from ...core.memory_plans import logit_bytes
from ...core.ranks import Ranks
from ...core.step import ByRow, Details, LossReplay, Outputs, backward_factor
from ...keys import ROW_KEY
from ...private_api import replaced
from ..verl_common.losses import ActorLoss, AnalysedLoss, changed, setting_of, token_weights


class VerlStep(LossReplay, ByRow):
    """One mini-batch of verl's actor or critic; inputs are those of its model and loss, by verl's names."""

    trainer_name = "verl 0.7"

    def __init__(self, config: Any, device_name: str, num_ranks: int, scaler: Any = None):
        super().__init__(torch.device(device_name), num_ranks, backward_factor(scaler))
        self.config = config

    def rows(self, micro_batch: int) -> list[int]:
        batch = self.micro_batches[micro_batch].inputs
        return batch[ROW_KEY].tolist() if ROW_KEY in batch else []

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self._mask(micro_batch).bool()

    def details(self, micro_batch: int) -> Details:
        mask, mode = self._mask(micro_batch), self.config.loss_agg_mode
        factor, sizes = (0.5, {}) if self.is_value else (1.0, self.config.global_batch_info)
        weights = token_weights(mask, lambda losses: factor * core_algos.agg_loss(losses, mask, mode, **sizes))
        return Details(self._old(micro_batch), weights * self.loss_scale_factor(micro_batch) / self.num_ranks)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        return self._forward(self.loss_inputs(micro_batch), needs_entropy)

    def forward_rows(self, rows: Sequence[tuple[int, list[int]]]) -> Outputs:
        return self._forward(self._inputs_of(rows))

    def setting(self, name: str) -> Any:
        return setting_of(self.config, name)

    @abstractmethod
    def _forward(self, inputs: dict[str, Any], needs_entropy: bool = False) -> Outputs:
        """Run verl's forward on the inputs of some rows."""

    @abstractmethod
    def _old(self, micro_batch: int) -> torch.Tensor:
        """Return what the loss compares log-probs or values with, (B, T)."""

    def _mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].inputs["response_mask"].to(get_device_id())

    def loss_inputs(self, micro_batch: int) -> dict[str, Any]:
        """Return the inputs of the model and the loss, on the device."""
        return _on_device(self.micro_batches[micro_batch].inputs)

    def _inputs_of(self, rows: Sequence[tuple[int, list[int]]]) -> dict[str, Any]:
        """Return the inputs of some rows of each micro-batch; all have one length."""

        def join(name: str, first: Any) -> Any:
            if not hasattr(first, "shape"):
                return first
            parts = [self.micro_batches[index].inputs[name][chosen] for index, chosen in rows]
            return torch.cat(parts) if isinstance(first, torch.Tensor) else np.concatenate(parts)

        return _on_device({name: join(name, each) for name, each in self.micro_batches[rows[0][0]].inputs.items()})

    def loss_scale_factor(self, micro_batch: int) -> float:
        """Return the factor of verl's gradient accumulation on this micro-batch's loss."""
        config = self.config
        if config.use_dynamic_bsz:
            return len(self.micro_batches[micro_batch].inputs["responses"]) / config.ppo_mini_batch_size
        return 1 / (config.ppo_mini_batch_size // config.ppo_micro_batch_size_per_gpu)


class ActorStep(VerlStep, ActorLoss):
    """One mini-batch of verl's ``DataParallelPPOActor``; ``on_policy``: the loss uses the present log-probs as the old
    ones."""

    def __init__(self, actor: Any, temperature: float, on_policy: bool, num_ranks: int):
        super().__init__(actor.config, actor.device_name, num_ranks, actor.scaler)
        self.actor, self.dtype = actor, actor.param_dtype
        self.temperature, self.on_policy = temperature, on_policy
        self.has_ratio_clips = actor.gradloc.weigher is not None

    def _forward(self, inputs: dict[str, Any], needs_entropy: bool = False) -> Outputs:
        has_entropy = needs_entropy or self.config.calculate_entropy or self.config.entropy_coeff != 0
        given = {"temperature": self.temperature, "calculate_entropy": has_entropy}
        entropy, log_prob = self.actor._forward_micro_batch(inputs, **given)
        return Outputs(log_prob, entropy if has_entropy else None)

    def forward_bytes(self) -> int:
        actor = self.actor
        if actor.use_fused_kernels:
            return 0
        masks = [each.inputs["attention_mask"] for each in self.micro_batches]
        num_positions = max(int(mask.sum()) if actor.use_remove_padding else mask.numel() for mask in masks)
        vocabulary = getattr(actor.actor_module.config.get_text_config(), "vocab_size", 0)
        config = actor.config
        is_chunked = config.entropy_from_logits_with_chunking and actor.use_remove_padding
        is_whole = (config.calculate_entropy or config.entropy_coeff != 0) and not is_chunked
        bytes_each = logit_bytes(has_entropy=is_whole)
        return int(num_positions * vocabulary * bytes_each) // actor.ulysses_sequence_parallel_size

    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        inputs = {**self.loss_inputs(micro_batch), "old_log_probs": self._old(micro_batch), **tensors}
        return own_loss(self.actor, inputs, given.log_prob, given.entropy, settings)

    # ---- inside

    def _old(self, micro_batch: int) -> torch.Tensor:
        """Return the old log-probs (B, T) that the loss used: the current ones under verl's on-policy shortcut."""
        recorded = self.recorded(micro_batch).log_prob
        if self.on_policy and not self.actor.config.get("use_rollout_log_probs", False):
            return recorded
        return self.micro_batches[micro_batch].inputs["old_log_probs"].to(recorded.device)


class AnalysedActorStep(ActorStep, AnalysedLoss):
    """This rank's rows of a batch as one mini-batch without an optimizer step, cut into training's micro-batches.

    Rows that only fill up the ranks get no weight. Forwards run with the model in training mode, and leave it so.
    """

    def __init__(self, actor: Any, data: Any, temperature: float, ranks: Ranks):
        config, is_real = actor.config, data.batch[BUCKET_KEY] >= 0
        rows = {**data.batch, "response_mask": data.batch["response_mask"] * is_real.unsqueeze(1)}
        mini_batches = DataProto.from_dict(rows).split(config.ppo_mini_batch_size)
        parts = [part for mini_batch in mini_batches for part in self._cut(mini_batch, config)]
        on_policy = len(mini_batches) == 1 and config.ppo_epochs == 1
        super().__init__(actor, temperature, on_policy, ranks.size)
        self._num_real_rows = ranks.sum([float(is_real.sum())])[0]
        actor.actor_module.train()
        self.record_forwards({**_real_rows(part).batch} for part in parts)

    @staticmethod
    def _cut(mini_batch: DataProto, config: Any) -> list[DataProto]:
        """Cut a mini-batch as verl's ``update_policy`` does."""
        if config.use_dynamic_bsz:
            return prepare_dynamic_batch(mini_batch, max_token_len=config.ppo_max_token_len_per_gpu)[0]
        return mini_batch.split(config.ppo_micro_batch_size_per_gpu)

    def label(self, name: str, micro_batch: int) -> torch.Tensor:
        """Return a tensor that the driver sent with the rows, (B,) or (B, T)."""
        return self.micro_batches[micro_batch].inputs[name]

    def weight_of(self, micro_batch: int, term: str, mode: str) -> tuple[float, bool]:
        return self.loss_scale_factor(micro_batch) / self.num_ranks, mode == "seq-mean-token-sum-norm"

    def loss_scale_factor(self, micro_batch: int) -> float:
        """Return the factor that makes verl's mean over this micro-batch its part of the mean over all real rows."""
        num_real = int((self.micro_batches[micro_batch].inputs[BUCKET_KEY] >= 0).sum())
        return num_real * self.num_ranks / self._num_real_rows

    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        factor = self.loss_scale_factor(micro_batch) / super().loss_scale_factor(micro_batch)
        return super().loss_under(micro_batch, given, settings, tensors) * factor


class CriticStep(VerlStep):
    """One mini-batch of verl's ``DataParallelPPOCritic``; values take the place of log-probs."""

    is_value = True
    dtype = torch.bfloat16
    """verl's critic casts to it, whatever the dtype of its weights."""

    def __init__(self, critic: Any, num_ranks: int):
        super().__init__(critic.config, critic.device_name, num_ranks)
        self.critic = critic

    def record_forward(self, micro_batch: dict[str, Any]) -> torch.Tensor:
        """Run and record training's forward of the next micro-batch; changes nothing."""
        self.before_forward(micro_batch)
        outputs = self._forward(micro_batch)
        self.after_forward(outputs)
        return outputs.log_prob

    def _forward(self, inputs: dict[str, Any], needs_entropy: bool = False) -> Outputs:
        """Run verl's forward by its class, since the watch has replaced the object's."""
        return Outputs(type(self.critic)._forward_micro_batch(self.critic, inputs))

    def _old(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].inputs["values"]

    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        inputs, config = {**self.micro_batches[micro_batch].inputs, **tensors}, changed(self.config, **settings)
        loss, _ = core_algos.compute_value_loss(
            vpreds=given.log_prob,
            values=inputs["values"],
            returns=inputs["returns"],
            response_mask=inputs["response_mask"],
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
        )
        return loss * self.loss_scale_factor(micro_batch)


def _real_rows(part: DataProto) -> DataProto:
    """Drop rows that only fill up the ranks; keep all if there are no others, since the peers' collectives wait."""
    is_real = part.batch[BUCKET_KEY] >= 0
    return part.select_idxs(is_real) if is_real.any() else part


def _on_device(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(get_device_id()) if hasattr(value, "to") else value for name, value in inputs.items()}


def own_loss(
    actor: Any,
    inputs: Mapping[str, Any],
    log_prob: torch.Tensor,
    entropy: torch.Tensor | None,
    settings: Mapping[str, Any],
) -> torch.Tensor:
    """Return the loss that verl would run backward from, an unscaled scalar; the actor is not changed.

    It is of these log-probs and entropies (B, T), None where the loss does not use any; ``old_log_probs`` are not
    recomputed. The settings replace those of the actor's config.
    """
    from verl.workers.actor import dp_actor  # not at the top: it imports this package

    losses: list[torch.Tensor] = []
    # in place of the scaler, which keeps the loss and runs no backward
    scaler = SimpleNamespace(scale=lambda loss: SimpleNamespace(backward=lambda: losses.append(loss)))
    # with use_rollout_log_probs verl takes the given old log-probs also on policy
    config = changed(actor.config, use_rollout_log_probs=True, ppo_epochs=1, **settings)
    instead = {
        "config": config,
        "scaler": scaler,
        "gradloc": NullHook(actor.gradloc),
        "actor_optimizer": SimpleNamespace(zero_grad=lambda: None),
        "gradient_accumulation": 1,  # which verl sets again
        "_forward_micro_batch": lambda *_, **__: (entropy, log_prob),
        "_optimizer_step": lambda: torch.zeros(()),
    }
    # verl's DataProto with one mini-batch of one micro-batch
    data = SimpleNamespace(batch=inputs, non_tensor_batch={}, meta_info={"temperature": 1.0})
    vars(data).update(select=lambda **_: data, split=lambda _: [data], to=lambda _: data)
    with replaced(actor, **instead), replaced(dp_actor, prepare_dynamic_batch=lambda *_, **__: ([data], None)):
        actor.update_policy(data)
    return losses[0]


class NullHook(Off):
    """Replaces the hook: changes the loss as the hook does, and records nothing."""

    def __init__(self, hook: Any):
        self.in_stage, self._hook = hook.in_stage, hook

    def token_weights(self, model_inputs: Any, log_prob: torch.Tensor, given: Any, _: Any) -> torch.Tensor | None:
        return self._hook.token_weights(model_inputs, log_prob.detach(), given, {})
