# SPDX-License-Identifier: Apache-2.0
"""Everything of TRL's and what is under it that is private or may change, and whether it still is as it was."""

from importlib.metadata import version

from ...touched import differences

KNOWN = ("1.16.0",)
"""The releases that were tested."""

_OF_TRAINER = {
    "_compute_loss": "self, model, inputs",
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "_generate_and_score_completions": "self, inputs",
    "training_step": "self, model, inputs, num_items_in_batch",
    "log": "self, logs, start_time",
    "_get_grad_norm": "self, model, grad_norm",
    "_clip_grad_norm": "self, model",
    "_save_checkpoint": "self, model, trial",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_save": "self, output_dir, state_dict",
    "_get_output_dir": "self, trial",
    "compute_loss_context_manager": "self",
    "get_tp_size": "self",
    "_defer_fsdp_gradient_reduction": "self",
    "_get_per_token_logps_and_entropies": None,
}
"""Of both trainers, also where transformers' Trainer has it; None: it only has to be there."""
_OTHERS = {
    "trl.trainer.grpo_trainer:GRPOTrainer.get_high_entropy_mask": "self, entropies, mask, threshold",
    "trl.trainer.utils:_ChunkedLogProbFunction.apply": None,
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE": None,
    "transformers.integrations.fsdp:is_fsdp_managed_module": "module",
    "accelerate:Accelerator.no_sync": "self, model",
    "accelerate:Accelerator.unscale_gradients": "self, optimizer",
    "accelerate:Accelerator.gather": "self, tensor",
    "accelerate:Accelerator.gather_for_metrics": None,
    "accelerate:Accelerator.reduce": "self, tensor, reduction, scale",
    "accelerate:Accelerator.get_state_dict": "self, model, unwrap",
}


def check_trl() -> None:
    """Refuse a TRL that this adapter does not fit.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    trainers = ("GRPOTrainer", "RLOOTrainer")
    touched = {f"trl:{name}.{method}": takes for name in trainers for method, takes in _OF_TRAINER.items()} | _OTHERS
    if changed := differences(touched):
        raise RuntimeError(
            f"TRL {version('trl')} or what it stands on changed what gradloc hangs on (it knows {', '.join(KNOWN)}): "
            f'{changed[0]}; pip install trl=={KNOWN[-1]}, or train with gradloc="off".'
        )
