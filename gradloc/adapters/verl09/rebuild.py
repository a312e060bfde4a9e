# SPDX-License-Identifier: Apache-2.0
"""A bundled event made runnable on verl 0.9: its engine around a given model, without Ray, and the event's step on it.

verl divides a micro-batch's loss by the tokens (or sequences) of the whole mini-batch and multiplies it by the number
of data-parallel ranks, which FSDP then averages over. The former are the run's, the latter this machine's, and so
every micro-batch keeps the weight that it had in the run.
"""

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.functional import pad

from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import DistillationConfig, DistillationLossConfig, HFModelConfig
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from ...core.gradients import GradientSpace
from ...keys import ROW_KEY
from ...replay.bundle import Bundle, Entry, ReplayError
from ...replay.dealt import Replayed
from ...reweighting.stages import STAGE_MASK_KEY
from ...stabilize.ratio_clip import TokenWeigher
from ..verl_common.loading import actor_config, clips_of, load
from ..verl_common.loading import start_processes as start_processes
from .loss import weighed, within_stage
from .packed import nested_rows
from .step import EngineStep
from .touches import check_verl

_PER_TOKEN = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
_PER_TOKEN += ("rollout_log_probs", STAGE_MASK_KEY)
_OURS = ("gradloc", "spike_detection", "grad_norm_threshold", "bisect_budget_steps", "bisect_dump_dir")
_OURS += ("filter_loss_scaling", "distillation_loss")
"""Of the actor's config: no part of verl's own."""


class ReplayEngine(FSDPEngineWithLMHead):
    """verl's engine around a module that is loaded already; it takes no steps."""

    def __init__(self, config: Any, model_config: HFModelConfig, module: torch.nn.Module):
        super().__init__(model_config, config.fsdp_config, config.optim, CheckpointConfig())
        self.config, self.device_name = config, get_device_name()
        self.module = self.actor_module = self._build_fsdp_module(module)


class ReplayStep(Replayed, EngineStep):
    """The event's step, as far as the bundle holds it: this process's micro-batches, see :class:`Replayed`."""

    def __init__(self, engine: ReplayEngine, bundle: Bundle, places: list[Entry | None], tick: Callable[[], Any]):
        super().__init__(engine, _loss_of(bundle, engine.config), dp_size=dist.get_world_size())
        self.places, self._tick = places, tick
        self._given = [_micro_batch(engine, bundle, entry or bundle.layout[0]) for entry in places]

    @property
    def num_micro_batches(self) -> int:
        return len(self.places)

    def train(self, space: GradientSpace) -> None:
        """The training pass: puts the step's gradient into ``.grad`` and records what it leaves behind."""
        for index, micro_batch in enumerate(self._given):
            self.recall(index)
            self.before_forward(micro_batch)
            kept: dict[str, torch.Tensor] = {}

            def watched(model_output: dict[str, torch.Tensor], kept: Any = kept, **given: Any) -> Any:
                kept.update(model_output)
                self.after_forward(model_output)
                return self.loss_function(model_output=model_output, **given)

            with self.in_pass(index == len(self.places) - 1):
                data = self._data(index)
                loss, _ = FSDPEngineWithLMHead.forward_step(self.engine, data, watched, forward_only=False)
                loss = loss if self.engine.scaler is None else self.engine.scaler.scale(loss)
                self.trained(index, loss, kept[self.output].values())
        if self.numerics.loss_scale != 1.0:
            space.scale(1.0 / self.numerics.loss_scale)


def _loss_of(bundle: Bundle, config: Any) -> partial:
    """The run's loss: with the weights of its clips, and of its stage."""
    loss, clips, distilled = partial(ppo_loss, config=config), clips_of(bundle), _distillation_of(bundle)
    if distilled is not None:
        loss = partial(distillation_ppo_loss, config=config, distillation_config=distilled)
    if clips.weighs_tokens:
        loss = weighed(loss, TokenWeigher(clips), dict)
    return within_stage(loss) if STAGE_MASK_KEY in bundle.tensors else loss


def _distillation_of(bundle: Bundle) -> DistillationConfig | None:
    """The run's, as far as it is part of the loss; None where its loss was that on rewards."""
    given = bundle.meta.actor.get("distillation_loss")
    if given is None:
        return None
    try:
        loss = DistillationLossConfig(**{name: value for name, value in given.items() if name != "_target_"})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ReplayError(f"meta.json: actor.distillation_loss: {error}") from error
    return DistillationConfig(distillation_loss=loss)


def _micro_batch(engine: ReplayEngine, bundle: Bundle, entry: Entry) -> TensorDict:
    """One micro-batch as verl's engine gets it: rows without padding, and how the whole mini-batch was."""
    tensors, config, num_response = bundle.tensors, engine.config, bundle.tensors["responses"].shape[1]
    rows: dict[str, list[torch.Tensor]] = {}
    for number in range(entry.first_row, entry.end_row):
        is_token = tensors["attention_mask"][number].bool()
        is_answer = is_token[-num_response:]
        row = {name: tensors[name][number][..., is_token] for name in ("input_ids", "position_ids")}
        row |= {name: tensors[name][number][is_answer] for name in _PER_TOKEN if name in tensors}
        row |= {
            "prompts": row["input_ids"][: -int(is_answer.sum())],
            "responses": row["input_ids"][-int(is_answer.sum()) :],
            "loss_mask": row["response_mask"],
            ROW_KEY: torch.tensor([number]),
        }
        if "teacher_log_probs" in tensors:
            of_answer = tensors["teacher_log_probs"][number][is_answer]
            row["teacher_logprobs"] = pad(of_answer, (len(row["prompts"]) - 1, 1)).unsqueeze(-1)
        for name, values in row.items():
            rows.setdefault(name, []).append(values)
    data = nested_rows(rows)
    if bundle.inputs is not None:
        tu.assign_non_tensor_stack(data, "multi_modal_inputs", bundle.inputs[entry.first_row : entry.end_row])
    tu.assign_non_tensor(
        data,
        temperature=bundle.meta.temperature,
        use_remove_padding=engine.use_remove_padding,
        use_fused_kernels=False,
        calculate_entropy=config.calculate_entropy or config.entropy_coeff != 0,
        dp_size=dist.get_world_size(),
        batch_num_tokens=bundle.event.trigger.num_tokens or int(tensors["response_mask"].bool().sum()),
        global_batch_size=config.ppo_mini_batch_size * config.rollout_n,
    )
    return data


def build_actor(bundle: Bundle, model_path: str) -> ReplayEngine:
    """verl's engine around the model at ``model_path``, on this machine's processes.

    Raises:
        ReplayError: the model cannot be loaded, does not fit the bundle, or would not fit into memory; or this verl
            is not the one that the engine is known of.
    """
    try:
        check_verl("replay")
    except RuntimeError as error:
        raise ReplayError(str(error)) from error
    clips_of(bundle), _distillation_of(bundle)  # refused before anything is loaded
    config = _actor_config(bundle)
    dtype = PrecisionType.to_dtype((config.fsdp_config.mixed_precision or {}).get("param_dtype", "bf16"))  # as verl's
    module = load(model_path, bundle, dtype)
    with contextlib.redirect_stdout(io.StringIO()):  # verl prints what it does
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        apply_monkey_patch(model=module, use_remove_padding=config.use_remove_padding, ulysses_sp_size=1)
        model_config = HFModelConfig(
            path=module.config.name_or_path,
            load_tokenizer=False,
            use_remove_padding=config.use_remove_padding,
            enable_gradient_checkpointing=module.is_gradient_checkpointing,
            override_config={"attn_implementation": module.config._attn_implementation},
        )
        return ReplayEngine(config, model_config, module)


def _actor_config(bundle: Bundle) -> Any:
    given = {key: value for key, value in bundle.meta.actor.items() if key not in (*_OURS, "profiler", "_target_")}

    def adapt(actor: dict[str, Any]) -> None:
        del actor["profiler"]
        actor["ppo_micro_batch_size_per_gpu"] = 1
        actor["fsdp_config"].update(
            strategy="fsdp2", param_offload=False, optimizer_offload=False, use_torch_compile=False
        )

    return actor_config(given, adapt)
