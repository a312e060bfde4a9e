# SPDX-License-Identifier: Apache-2.0
"""What TRL's arguments say of the trained model's layout and load, before a run. Imports neither torch nor TRL."""

from collections.abc import Mapping
from typing import Any

from ...core.forecast import Layout, Load, Plan
from .config import Setup


def plan_of(given: Mapping[str, Any], gpus: int, on_host: int) -> Plan:
    """The plan of a run; ``given`` are TRL's arguments by name, as its YAML has them.

    Args:
        given: what it lacks takes TRL's own default.
        gpus: of the run; TRL's arguments do not say how many.
        on_host: of a node.
    """
    longest = int(given.get("max_prompt_length") or 512) + int(given.get("max_completion_length") or 256)
    longest = int(given.get("max_length") or longest)
    rows, micro_batches = given.get("per_device_train_batch_size", 8), given.get("gradient_accumulation_steps", 1)
    is_sharded = bool(given.get("fsdp"))
    is_half = given.get("bf16", True) or given.get("fp16", False)
    is_fused = bool(given.get("use_liger_kernel"))
    return Plan(
        str(given.get("model_name_or_path", "")),
        Layout(gpus, gpus if is_sharded else 1, on_host, whole=4 if gpus > 1 and not is_sharded else 0),
        Load(
            int(rows) * longest,
            int(micro_batches),
            2 if is_half else 4,
            bool(given.get("gradient_checkpointing", True)),
            0.0 if is_fused else 8.5,  # TRL divides by the temperature, and always asks for entropies, in pieces
        ),
        int(given.get("lora_r", 16)) if given.get("use_peft") else 0,
    )


def setup_of(given: Mapping[str, Any], gpus: int) -> Setup:
    """What of these arguments may be refused; a launcher's own settings are not among them."""
    kind = "FSDP" if given.get("fsdp") else "DEEPSPEED" if given.get("deepspeed") else "MULTI_GPU"
    settings = given.get("fsdp_config") or {}
    version = settings.get("fsdp_version", settings.get("version", 2)) if isinstance(settings, Mapping) else 2
    return Setup(
        kind if kind != "MULTI_GPU" or gpus > 1 else "NO",
        kind == "FSDP" and int(version) == 1,
        str(given.get("optim", "adamw_torch")),
        torch_compile=bool(given.get("torch_compile", False)),
    )
