# SPDX-License-Identifier: Apache-2.0
"""Everything of verl's that is private or may change, in one place, and whether it still is as it was."""

import ast
import hashlib
import inspect
import logging
import re
import textwrap
from typing import Any

import verl

from ...touched import differences, find

logger = logging.getLogger(__name__)

KNOWN = ("0.9.0", "0.9.1")
"""The releases that are known: the latter was tested, the former read."""

_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_MERGER = "verl.model_merger.fsdp_model_merger:FSDPModelMerger"
_WORKER = "verl.workers.engine_workers:TrainingWorker"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_LOSSES = {
    "verl.workers.utils.losses:ppo_loss": "config, model_output, data, dp_group",
    "verl.workers.utils.losses:kl_penalty": "logprob, ref_logprob, kl_penalty",
    "verl.workers.utils.padding:no_padding_2_padding": "tensor, data",
    "verl.workers.utils.padding:response_to_nested": "tensor, response_mask",
    "verl.utils.tensordict_utils:index_select_tensor_dict": "batch, indices",
    "verl.trainer.ppo.core_algos:agg_loss": None,
    "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward": (
        "self, hidden_states, vocab_weights, input_ids, temperature"
    ),
}
_BY_WORKER = {
    **_LOSSES,
    f"{_ENGINE}.train_batch": "self, data, loss_function",
    f"{_ENGINE}.infer_batch": "self, data, loss_function",
    f"{_ENGINE}.forward_step": "self, micro_batch, loss_function, forward_only",
    f"{_ENGINE}.optimizer_step": "self",
    f"{_ENGINE}.lr_scheduler_step": "self",
    f"{_ENGINE}.get_data_parallel_group": "self",
    f"{_ENGINE}._gradient_sync_context": "self, is_last_micro_batch",
    "verl.workers.engine.fsdp.transformer_impl:fsdp2_clip_grad_norm_": (
        "parameters, max_norm, norm_type, error_if_nonfinite, foreach"
    ),
    "verl.utils.activation_offload:ActivationHandler.forward": "self, module, forward_method, args, kwargs",
    "verl.utils.activation_offload:AsyncDoubleBufferGroupOffloadHandler.groupid_reset": "self",
    "verl.workers.engine.utils:prepare_micro_batches": (
        "data, dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch, use_dynamic_bsz_balance"
    ),
}
_BY_TRAINER = {
    f"{_TRAINER}.__init__": "self, config",
    f"{_TRAINER}.on_train_begin": "self",
    f"{_TRAINER}._update_actor": "self, batch, metrics",
    f"{_TRAINER}._update_critic": "self, batch, metrics",
    f"{_TRAINER}._compute_advantage": "self, batch, metrics",
    f"{_TRAINER}._compute_metrics": "self, batch, metrics, timing_raw, global_steps, epoch",
    f"{_TRAINER}._save_checkpoint": "self",
    f"{_TRAINER}._load_checkpoint": "self",
    f"{_TRAINER}._init_tokenizer": "self",
    f"{_TRAINER}._init_dataloader": "self",
    f"{_TRAINER}._build_replay_buffer": "self",
    f"{_TRAINER}._fetch_one_gen_batch": "self",
    f"{_TRAINER}.step": "self, metrics, timing_raw",
    f"{_TRAINER}.fit": "self, agent_loop_manager",
    f"{_TRAINER}._balance_batch": "self, batch, metrics, logging_prefix, keep_minibatch",
    f"{_TRAINER}._shutdown_dump_executor": "self",
    "verl.single_controller.base.worker:Worker.execute_with_func_generator": None,
    "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY": None,
    "verl.workers.utils.padding:response_to_nested": "tensor, response_mask",
}
_BY_REPLAY = {
    **_BY_WORKER,
    f"{_ENGINE}._build_fsdp_module": "self, module",
    f"{_MERGER}._get_world_size": "self",
    f"{_MERGER}._load_rank_zero_state_dict": "self, world_size",
    f"{_MERGER}._extract_device_mesh_info": "self, state_dict, world_size",
    f"{_MERGER}._calculate_shard_configuration": "self, mesh, mesh_dim_names",
    f"{_MERGER}._merge_by_placement": "self, tensors, placement",
}
_BY_MEGATRON = {
    **_LOSSES,
    f"{_MEGATRON}.train_batch": "self, data, loss_function",
    f"{_MEGATRON}.forward_backward_batch": "self, data, loss_function, forward_only",
    f"{_MEGATRON}.forward_step": "self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func",
    f"{_MEGATRON}.postprocess_micro_batch_func": "self, output, data, forward_only, loss_function, local_cp_size",
    f"{_MEGATRON}.optimizer_zero_grad": "self",
    f"{_MEGATRON}.optimizer_step": "self",
    f"{_MEGATRON}.lr_scheduler_step": "self",
    f"{_MEGATRON}.get_data_parallel_rank": "self",
    f"{_MEGATRON}.get_data_parallel_size": "self",
    f"{_MEGATRON}.get_data_parallel_group": "self",
    "verl.utils.megatron.pipeline_parallel:make_batch_generator": "batches, vpp_size",
    "verl.utils.megatron.tensor_parallel:vocab_parallel_entropy": "vocab_parallel_logits",
    "verl.utils.megatron.tensor_parallel:vocab_parallel_log_probs_from_logits": "logits, labels",
    "verl.models.mcore.model_forward_fused:linear_cross_entropy": None,
    "verl.utils.megatron.optimizer:get_megatron_last_lr": "optimizer",
    "megatron.core.optimizer:ChainedOptimizer.get_grad_norm": "self",
    "megatron.core.optimizer:ChainedOptimizer.prepare_grads": "self",
    "megatron.core.optimizer:ChainedOptimizer.step_with_ready_grads": "self",
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32": (
        "parameters, max_norm, total_norm, use_decoupled_grad"
    ),
    "megatron.core.distributed:finalize_model_grads": "model, num_tokens, pg_collection, force_all_reduce",
    "megatron.core.utils:get_model_config": "model",
    "megatron.core.transformer.module:param_is_not_shared": "param",
    "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale": "scale",
}
TOUCHED = {"megatron": _BY_MEGATRON, "worker": _BY_WORKER, "trainer": _BY_TRAINER, "replay": _BY_REPLAY}
"""By who touches it: ``module:name`` and its parameters; None: it only has to be there."""

_BODIES: dict[str, str] = {
    f"{_ENGINE}.forward_backward_batch": "29e272a8addc 4383a855ffa8",
    f"{_ENGINE}.optimizer_step": "99b05fb600cc",
    f"{_ENGINE}._gradient_sync_context": "394cb7e95d73 29b62ff7f663",
    f"{_ENGINE}.forward_step": "2dce6a1ef8de 8d04e7523abb",
    f"{_ENGINE}.train_batch": "e804d8f783c4",
    f"{_ENGINE}.infer_batch": "af2d273a45f5",
    f"{_WORKER}.train_mini_batch": "7f35c73bad8e c374c95a8ec7",
    f"{_WORKER}.train_batch": "ffc25d928610",
    f"{_WORKER}.infer_batch": "43719554fb77",
    "verl.workers.utils.losses:ppo_loss": "1a94e2c7e97e",
    "verl.workers.utils.padding:no_padding_2_padding": "b725f2da8016",
    f"{_TRAINER}.fit": "f4870a65e903",
    f"{_TRAINER}._step_once": "4483283df529",
    f"{_TRAINER}._balance_batch": "0fd40c29f3b2",
    f"{_TRAINER}._compute_advantage": "4367e544c970",
    f"{_TRAINER}._update_actor": "826592c43362",
    f"{_TRAINER}._update_critic": "73213ded2224",
    f"{_TRAINER}._compute_metrics": "af0e5c606d05 e8663b5bcc53",
    f"{_TRAINER}._save_checkpoint": "adb4522e6051 4b8100b3ef0b",
    f"{_TRAINER}._load_checkpoint": "edd043623c6c 0e6e63f5c579",
}
"""What we rely on without calling it, or replace in part: the digests of the code that is known, of 0.9.0, 0.9.1 and
0.10's development (1dda039b, August 2026). Another one is a warning."""


def changed_bodies() -> list[str]:
    """What the installed verl does in another way than any that is known."""
    return [place for place, known in _BODIES.items() if _digest_at(place) not in known.split()]


def _digest_at(place: str) -> str:
    """Of a function's code: comments, docstring, decorators, signature and blank lines aside."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(find(place))))
    except (ImportError, AttributeError, OSError, TypeError):
        return "gone"
    statements: list[Any] = ast.parse(source).body[0].body
    has_docstring = isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant)
    first = statements[1 if has_docstring and len(statements) > 1 else 0]
    lines = [line.rstrip() for line in source.splitlines()[first.lineno - 1 :]]
    code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def check_verl(who: str) -> None:
    """Refuse a verl that this adapter does not fit: what decides is what it touches, not how the release is called.

    To the trainer, changes that may be harmless are a warning. ``who`` is one of ``TOUCHED``.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    release = verl.__version__
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < (0, 9):
        raise RuntimeError(
            f"gradloc's plug-in is for verl 0.9, found verl {release}: on 0.7.0 and 0.7.1 apply the patch "
            "(gradloc-patch --repo VERL), from 0.8 move on to 0.9, and leave +gradloc out until then."
        )
    if changed := differences(TOUCHED[who]):
        raise RuntimeError(
            f"verl {release} changed what gradloc hangs on (it knows {', '.join(KNOWN)}): {changed[0]}; "
            "install one of these, or leave +gradloc out."
        )
    if who == "trainer" and (changed := changed_bodies()):
        logger.warning(
            "gradloc: verl %s changed the code of %s, which gradloc knows of %s: it goes on; a rehearsal "
            "(actor_rollout_ref.actor.gradloc.trigger.force_step=1) shows whether it still measures what it should",
            release,
            ", ".join(place.partition(":")[2] for place in changed),
            ", ".join(KNOWN),
        )
