# SPDX-License-Identifier: Apache-2.0
"""Settings ``gradloc=`` and ``health=`` of a TRL user, the runs that are refused, and what a run's arguments
say of its load. Imports neither torch nor TRL.

``touched.json`` lists what is private or may change of TRL and what is under it: each function's parameters, or null
where it only has to be there.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...analysis.config import Analyses, taken_from
from ...checks import require
from ...config import GradLocConfig, settings_without_verl
from ...forecast import Layout, Load, Plan
from ...health.config import HealthConfig
from ...private_api import differences
from ...record import ACTIONS
from ...reweighting.config import LoptiConfig


def settings_of(given: Any, output_dir: str) -> GradLocConfig | None:
    """Return the run's settings; None: off.

    Args:
        given: an action's mode or ``off``; settings by name, as YAML or a JSON string have them; or a GradLocConfig.
        output_dir: the run's folder; events go to ``gradloc`` in it, unless ``dump_dir`` says otherwise.

    Raises:
        ValueError: one sentence, for a wrong name or value, and for what TRL's trainers do not have.
    """
    given = _parsed(given)
    if given in ("off", False, None):  # YAML reads a bare off as false
        return None
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if name not in _FEATURES}
    if isinstance(given, str):
        require(given in ACTIONS, "gradloc", f"off, {', '.join(ACTIONS)}, or settings by name", given)
        given = {"action": {"mode": given}}
    return settings_without_verl(given, os.path.join(output_dir, "gradloc"), "TRL, whose trainers have none", _FEATURES)


_FEATURES = ("buckets", "quartiles", "lopti")


def features_of(given: Any) -> tuple[Analyses, LoptiConfig | None]:
    """Return the analyses and Lopti of the blocks ``buckets``, ``quartiles`` and ``lopti`` of these settings.

    Raises:
        ValueError: one sentence.
    """
    given = _parsed(given)
    blocks = {name: given[name] for name in _FEATURES if name in given} if isinstance(given, Mapping) else {}
    lopti, analyses = blocks.pop("lopti", None), taken_from(blocks)
    if lopti in (None, False):
        return analyses, None
    settings = dict(lopti) if isinstance(lopti, Mapping) else {}
    require(set(settings) <= {"eta"}, "gradloc's lopti", "true, or eta by name", lopti)
    return analyses, LoptiConfig(enable=True, **settings)


def health_of(given: Any) -> HealthConfig | None:
    """Return the health monitor's settings; None: off.

    Args:
        given: True or False; or settings by name, as YAML or a JSON string have them.

    Raises:
        ValueError: one sentence.
    """
    given = _parsed(given)
    if isinstance(given, Mapping):
        given = HealthConfig(**{"enable": True, **given})
    elif not isinstance(given, HealthConfig):
        require(given in (True, False, None), "health", "true, false, or settings by name", given)
        given = HealthConfig(enable=bool(given))
    return given if given.enable else None


_NEEDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accelerate's distributed type": (
        lambda kind: kind in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"),
        "one process, DDP or FSDP2 (other engines step by themselves or keep gradients elsewhere than in .grad)",
    ),
    "fsdp_version": (lambda version: version != 1, "2 (FSDP1 was not tried with TRL)"),
    "optim": (
        lambda name: not name.startswith(("lomo", "adalomo")) and "layerwise" not in name,
        "an optimizer that steps once, after the backward",
    ),
    "tensor parallelism": (lambda size: size == 1, "1 (it was not tried)"),
    "distributed_config.dp_replicate_size": (lambda size: size == 1, "1 (hybrid sharding was not tried)"),
    "torch_compile": (lambda is_on: not is_on, "false (compiled models were not tried)"),
    "model": (lambda kind: kind == "one of text", "a model of text (pictures were not tried)"),
    "gradient_as_bucket_view": (
        lambda is_on: not is_on,
        "false (a probe would overwrite the gradient that is set aside)",
    ),
}
"""Facts of a run that a search depends on: the needed value, and how it reads after "must be"."""
_SHARDED = "sharded at load"


def setup_of(trainer: Any) -> dict[str, Any]:
    """Return the facts of a trainer that a search depends on, by name, and whether transformers shards its model."""
    args, accelerator = trainer.args, trainer.accelerator
    config, kind = getattr(trainer.model.config, "distributed_config", None), accelerator.distributed_type.name
    return {
        "accelerate's distributed type": kind,
        "fsdp_version": 1 if kind == "FSDP" and not accelerator.is_fsdp2 else 2,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "tensor parallelism": trainer.get_tp_size(),
        "distributed_config.dp_replicate_size": 1 if config is None else config.dp_replicate_size,
        "torch_compile": args.torch_compile,
        "model": "one of pictures and text" if trainer._is_vlm else "one of text",
        "gradient_as_bucket_view": getattr(accelerator.ddp_handler, "gradient_as_bucket_view", False),
        _SHARDED: config is not None,
    }


def setup_in(given: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return those facts that TRL's arguments say before a run; a launcher's own settings are not known then."""
    kind = "FSDP" if given.get("fsdp") else "DEEPSPEED" if given.get("deepspeed") else "MULTI_GPU"
    settings = given.get("fsdp_config") or {}
    version = settings.get("fsdp_version", settings.get("version", 2)) if isinstance(settings, Mapping) else 2
    return {
        "accelerate's distributed type": kind if kind != "MULTI_GPU" or gpus > 1 else "NO",
        "fsdp_version": int(version) if kind == "FSDP" else 2,
        "optim": str(given.get("optim", "adamw_torch")),
        "torch_compile": bool(given.get("torch_compile", False)),
    }


def refuse(run: Mapping[str, Any], settings: GradLocConfig | None) -> None:
    """Refuse a run that no search could look into, or whose weights could not be kept as asked for.

    Raises:
        ValueError: one sentence that names the setting, what was found and what to do.
    """
    instead = 'with gradloc; gradloc="off" trains without'
    for key, (holds, expected) in _NEEDS.items():
        require(key not in run or holds(run[key]), key, f"{expected} {instead}", run.get(key))
    keeps = "off" if settings is None else settings.evidence.checkpoint
    expected = f"off where the model is {_SHARDED} {instead}"
    require(not run.get(_SHARDED) or keeps == "off", "gradloc.evidence.checkpoint", expected, keeps)


def _parsed(given: Any) -> Any:
    """Parse settings that come as JSON, from the command line."""
    is_json = isinstance(given, str) and given.lstrip().startswith("{")
    return json.loads(given) if is_json else given


KNOWN, TRANSFORMERS = ("1.16.0",), "5.23.0"
"""The releases that were tested; TRL itself asks for less of transformers."""
TOUCHED = json.loads(Path(__file__).with_name("touched.json").read_text(encoding="utf-8"))["trainer"]


def check_trl() -> None:
    """Refuse a TRL that this adapter does not fit.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    if changed := differences(TOUCHED):
        raise RuntimeError(
            f"TRL {version('trl')} on transformers {version('transformers')} is not what gradloc hangs on (it knows "
            f"{', '.join(KNOWN)} on {TRANSFORMERS}): {changed[0]}; pip install trl=={KNOWN[-1]} "
            f'transformers=={TRANSFORMERS}, or train with gradloc="off".'
        )


# ---- before a run

ARGUMENTS = frozenset(
    """
    adam_beta1 adam_beta2 adam_epsilon beta bf16 completion_only_loss data_seed dataset_config dataset_name
    dataset_path dataset_text_field datasets ddp_find_unused_parameters deepspeed do_train dtype epsilon epsilon_high
    eval_strategy fp16 fsdp fsdp_config generation_batch_size gradient_accumulation_steps gradient_checkpointing
    gradloc health learning_rate logging_steps lora_alpha lora_r lora_target_modules loss_type lr_scheduler_type
    mask_truncated_completions max_completion_length max_grad_norm max_length max_prompt_length max_steps
    model_name_or_path num_generations num_iterations num_train_epochs optim output_dir packing
    per_device_train_batch_size ref_model report_to reward_funcs reward_weights run_name save_steps save_strategy
    scale_rewards seed steps_per_generation temperature top_entropy_quantile torch_compile torch_dtype
    use_liger_kernel use_peft use_vllm vllm_mode warmup_ratio warmup_steps weight_decay
    """.split()
)
"""Arguments of TRL's scripts, by which a file is known as theirs; not all of them."""


def misspelt(names: Iterable[str]) -> list[str]:
    """Return a question for each name that is nearly that of an argument, but not one.

    >>> misspelt(["lerning_rate", "learning_rate", "num_generations_eval"])
    ['lerning_rate: did you mean learning_rate?']
    """
    near = {name: get_close_matches(str(name), ARGUMENTS - {name}, n=1, cutoff=0.88) for name in names}
    return [f"{name}: did you mean {near[name][0]}?" for name in near if near[name] and name not in ARGUMENTS]


def plan_of(given: Mapping[str, Any], gpus: int, gpus_per_node: int) -> Plan:
    """Return the plan of a run on these GPUs; ``given`` are TRL's arguments by name, as in its YAML.

    What they lack takes TRL's own default. They do not say how many GPUs there are.
    """
    longest = int(given.get("max_prompt_length") or 512) + int(given.get("max_completion_length") or 256)
    longest = int(given.get("max_length") or longest)
    rows, micro_batches = given.get("per_device_train_batch_size", 8), given.get("gradient_accumulation_steps", 1)
    for name, size in (("per_device_train_batch_size", rows), ("gradient_accumulation_steps", micro_batches)):
        require(int(size) > 0, name, "a positive integer", size)
    is_sharded = bool(given.get("fsdp"))
    is_half = given.get("bf16", True) or given.get("fp16", False)
    # TRL divides by the temperature, and always asks for entropies, in pieces
    logit_bytes = 0.0 if given.get("use_liger_kernel") else 8.5
    return Plan(
        str(given.get("model_name_or_path", "")),
        Layout(gpus, gpus if is_sharded else 1, gpus_per_node, whole_bytes=4 if gpus > 1 and not is_sharded else 0),
        Load(
            int(rows) * longest,
            int(micro_batches),
            number_bytes=2 if is_half else 4,
            is_checkpointed=bool(given.get("gradient_checkpointing", True)),
            logit_bytes=logit_bytes,
        ),
        int(given.get("lora_r", 16)) if given.get("use_peft") else 0,
    )
