# SPDX-License-Identifier: Apache-2.0
"""Everything of verl's that is private or may change, in one place, and whether it still is as it was."""

from importlib.metadata import PackageNotFoundError, version

from ...touched import difference

__all__ = ["KNOWN", "check_verl", "differences", "verl_version"]

KNOWN = ("0.9.0", "0.9.1")
"""The releases that were tested."""

_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_MERGER = "verl.model_merger.fsdp_model_merger:FSDPModelMerger"
_BY_WORKER = {
    f"{_ENGINE}.train_batch": "self, data, loss_function",
    f"{_ENGINE}.forward_step": "self, micro_batch, loss_function, forward_only",
    f"{_ENGINE}.optimizer_step": "self",
    f"{_ENGINE}.lr_scheduler_step": "self",
    f"{_ENGINE}.is_mp_src_rank_with_outputs": "self",
    f"{_ENGINE}.get_data_parallel_group": "self",
    f"{_ENGINE}._gradient_sync_context": "self, is_last_micro_batch",
    "verl.workers.engine.fsdp.transformer_impl:fsdp2_clip_grad_norm_": (
        "parameters, max_norm, norm_type, error_if_nonfinite, foreach"
    ),
    "verl.workers.engine:EngineRegistry.register": "model_type, backend, device, vendor",
    "verl.workers.engine:EngineRegistry.get_engine_cls": "model_type, backend",
    "verl.workers.utils.losses:ppo_loss": "config, model_output, data, dp_group",
    "verl.trainer.ppo.core_algos:agg_loss": None,
    "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward": (
        "self, hidden_states, vocab_weights, input_ids, temperature"
    ),
}
_BY_TRAINER = {
    f"{_TRAINER}.__init__": "self, config",
    f"{_TRAINER}.on_train_begin": "self",
    f"{_TRAINER}._update_actor": "self, batch, metrics",
    f"{_TRAINER}._update_critic": "self, batch, metrics",
    "verl.single_controller.base.worker:Worker.execute_with_func_generator": None,
    f"{_TRAINER}._compute_advantage": "self, batch, metrics",
    f"{_TRAINER}._compute_metrics": "self, batch, metrics, timing_raw, global_steps, epoch",
    f"{_TRAINER}._save_checkpoint": "self",
    f"{_TRAINER}._load_checkpoint": "self",
    f"{_TRAINER}._init_tokenizer": "self",
    "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY": None,
    "verl.workers.utils.padding:response_to_nested": "tensor, response_mask",
}
_BY_REPLAY = {
    f"{_ENGINE}._build_fsdp_module": "self, module",
    f"{_MERGER}._get_world_size": "self",
    f"{_MERGER}._load_rank_zero_state_dict": "self, world_size",
    f"{_MERGER}._extract_device_mesh_info": "self, state_dict, world_size",
    f"{_MERGER}._calculate_shard_configuration": "self, mesh, mesh_dim_names",
    f"{_MERGER}._merge_by_placement": "self, tensors, placement",
}
_TOUCHED = {"worker": _BY_WORKER, "trainer": _BY_TRAINER, "replay": _BY_WORKER | _BY_REPLAY}
"""By who touches it: ``module:name`` and its parameters; None: it only has to be there."""


def verl_version() -> str:
    """The installed verl's."""
    try:
        return version("verl")
    except PackageNotFoundError:
        import verl

        return verl.__version__


def differences(who: str) -> list[str]:
    """What of the installed verl is not as we know it, a sentence each.

    Args:
        who: ``worker``, ``trainer`` or ``replay``.
    """
    return [found for place, expected in _TOUCHED[who].items() if (found := difference(place, expected)) is not None]


def check_verl(who: str) -> None:
    """Refuse a verl that this adapter does not fit.

    Args:
        who: touches it: ``worker``, ``trainer`` or ``replay``.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    found = verl_version()
    if not found.startswith("0.9."):
        raise RuntimeError(
            f"gradloc's plug-in is for verl 0.9, found verl {found}: on 0.7.0 and 0.7.1 apply the patch "
            "(gradloc-patch --repo VERL), from 0.8 move on to 0.9, and leave +gradloc out until then."
        )
    changed = differences(who)
    if changed:
        raise RuntimeError(
            f"verl {found} changed what gradloc hangs on (it knows {', '.join(KNOWN)}): {changed[0]}; "
            "install one of these, or leave +gradloc out."
        )
