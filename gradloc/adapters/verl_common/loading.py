# SPDX-License-Identifier: Apache-2.0
"""What a replay needs of any verl: processes, the event's micro-batches dealt out, and a model from its folder."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

import verl
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device

from ...core.memory import free_bytes
from ...replay.bundle import Bundle, ReplayError
from ...stabilize.config import SeqClipConfig, StabilizeConfig, TokenClipConfig

_NUM_COPIES = 5  # of the model in float32: weights, gradient, the gradient set aside, the weights' copy, a residual


def start_processes() -> None:
    """Join torchrun's process group, or make one of this process alone: verl's actor asks for its rank."""
    if dist.is_initialized():
        return
    device = get_device_name()
    if device != "cpu":
        get_torch_device().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return get_device_name() == "cuda" and is_flash_attn_2_available()


# ---- the config


def actor_config(of_run: dict[str, Any], adapt: Callable[[dict[str, Any]], None]) -> Any:
    """The run's actor config over this verl's defaults, as verl's dataclass.

    Args:
        of_run: what of the run's own is part of the loss.
        adapt: changes the merged config in place to suit this machine, as far as this verl needs more than any does.

    Raises:
        ReplayError: it is no config of this verl's actor, or wants something built that verl's own does not.
    """
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    actor: Any = OmegaConf.to_container(OmegaConf.select(defaults, "actor_rollout_ref.actor"), resolve=True)
    unknown = _targets_in(of_run) - _targets_in(actor)
    if unknown:  # a config says what is to be built from it; a bundle from elsewhere must not be able to run anything
        raise ReplayError(
            f"meta.json: actor names {min(unknown)!r:.80} as a _target_, which verl's own config does not."
        )
    try:
        actor = OmegaConf.to_container(OmegaConf.merge(actor, of_run))
        adapt(actor)
        same_loss = {"use_torch_compile": False, "use_fused_kernels": False, "ulysses_sequence_parallel_size": 1}
        actor.update(same_loss, strategy="fsdp2", ppo_micro_batch_size=None)
        actor["fsdp_config"].update(fsdp_size=-1, ulysses_sequence_parallel_size=1, offload_policy=False)
        return omega_conf_to_dataclass(OmegaConf.create(actor))
    except Exception as error:  # hydra, omegaconf and verl's own checks each raise their own kinds
        why = _first_line(error.__cause__ or error)
        raise ReplayError(f"meta.json: actor is no config of this verl's actor: {why}.") from error


def clips_of(bundle: Bundle) -> StabilizeConfig:
    """Of the run's stabilizers those that are part of its loss.

    Raises:
        ReplayError: their settings are none, or the bundle does not hold what they weighed the loss by.
    """
    block = (bundle.meta.actor.get("gradloc") or {}).get("stabilize") or {}
    given = {name: dict(block.get(name) or {}) for name in ("token_clip", "seq_clip")}
    for settings in given.values():
        settings.pop("_target_", None)
    try:
        clips = StabilizeConfig(TokenClipConfig(**given["token_clip"]), SeqClipConfig(**given["seq_clip"]))
    except (TypeError, ValueError) as error:
        raise ReplayError(f"meta.json: actor.gradloc.stabilize: {error}") from error
    if clips.weighs_tokens and "rollout_log_probs" not in bundle.tensors:
        raise ReplayError("batch.safetensors: rollout_log_probs is missing, by which the run's clips weighed its loss.")
    return clips


def _targets_in(value: Any) -> set[str]:
    """Every ``_target_`` in a config, however deep."""
    if isinstance(value, list):
        return set().union(*map(_targets_in, value))
    if not isinstance(value, dict):
        return set()
    own = {str(value["_target_"])} if "_target_" in value else set()
    return own.union(*map(_targets_in, value.values()))


# ---- the model


def load(path: str, bundle: Bundle, dtype: torch.dtype) -> Any:
    """transformers' model at ``path`` in float32, as verl's actor keeps it, ready to be trained on one step.

    It has to fit the bundle and, computing in ``dtype``, this machine's memory.

    Raises:
        ReplayError: it cannot be loaded, is not the event's, or would not fit.
    """
    folder, is_checkpoint = _find_model(Path(path))
    outline = _outline_of(folder / "huggingface" if is_checkpoint else folder, bundle)
    needs_checkpointing = _check_memory(outline, bundle, dtype)
    attention = "flash_attention_2" if has_flash_attention() else "sdpa"
    module = _load_model(folder, is_checkpoint, outline.config, attention)
    if needs_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module.train()


class _ShardReader(FSDPModelMerger):
    """verl's merger, but in the precision of the checkpoint: merging to disk rounds the weights to bfloat16."""

    def read(self) -> dict[str, torch.Tensor]:
        world_size, folder = self._get_world_size(), Path(self.config.local_dir)
        first = self._load_rank_zero_state_dict(world_size)
        num_shards, _ = self._calculate_shard_configuration(*self._extract_device_mesh_info(first, world_size))
        paths = [folder / f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(1, num_shards)]
        shards = [first] + [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
        return {name: self._merge([shard[name] for shard in shards]) for name in first}

    def _load_rank_zero_state_dict(self, world_size: int) -> dict[str, torch.Tensor]:
        path = Path(self.config.local_dir) / f"model_world_size_{world_size}_rank_0.pt"
        return torch.load(path, map_location="cpu", weights_only=True)

    def _merge(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(parts[0], DTensor):  # the last mesh dimension is the sharded one
            return self._merge_by_placement([part._local_tensor for part in parts], parts[0].placements[-1])
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _find_model(path: Path) -> tuple[Path, bool]:
    """The folder to load from, and whether it is a checkpoint of verl's FSDP workers."""
    for folder in (path, path / "actor"):
        if (folder / "fsdp_config.json").is_file() and (folder / "huggingface" / "config.json").is_file():
            return folder, True
    if (path / "config.json").is_file():
        return path, False
    raise ReplayError(
        f"{path} is neither a Hugging Face model folder (config.json) nor a checkpoint folder of verl's FSDP workers "
        "(global_step_N/actor with fsdp_config.json)."
    )


def _outline_of(folder: Path, bundle: Bundle) -> torch.nn.Module:
    """The model without its weights; refuses one that the bundle's tokens cannot belong to."""
    from transformers import AutoConfig

    with _explained(f"{folder} does not describe a causal language model"):
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            outline = _class_of(config).from_config(config)
    size = outline.get_input_embeddings().num_embeddings
    ids = bundle.tensors["input_ids"]
    if not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ReplayError(
            f"The model at {folder} is not the event's: it knows tokens 0 to {size - 1}, and the bundle holds token "
            f"{int(ids.max()) if ids.max() >= size else int(ids.min())}."
        )
    return outline


def _class_of(config: Any) -> Any:
    """The class of transformers that verl's worker would load."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_pictures = type(config) in AutoModelForImageTextToText._model_mapping.keys()
    return AutoModelForImageTextToText if reads_pictures else AutoModelForCausalLM


def _load_model(folder: Path, is_checkpoint: bool, config: Any, attention: str) -> Any:
    """The model with its weights in float32, as verl's actor keeps them."""
    kind = _class_of(config)
    with _explained(f"The model at {folder} cannot be loaded"):
        if not is_checkpoint:
            module, info = kind.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, attn_implementation=attention
            )
            module = module.float()
            missing = set(info["missing_keys"])
        else:
            described = str(folder / "huggingface")
            merger = ModelMergerConfig("merge", "fsdp", local_dir=str(folder), hf_model_config_path=described)
            module = kind.from_config(config, attn_implementation=attention).float()
            keys = module.load_state_dict(_ShardReader(merger).read(), strict=False)
            missing = set(keys.missing_keys) | set(keys.unexpected_keys)
        missing -= set(getattr(module, "_tied_weights_keys", None) or ())
        if missing:
            raise ValueError(f"its config and its weights do not agree on {min(missing)}")
    return module


@contextlib.contextmanager
def _explained(what: str):
    try:
        yield
    except ReplayError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, AssertionError) as error:
        raise ReplayError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- memory


def _check_memory(outline: torch.nn.Module, bundle: Bundle, dtype: torch.dtype) -> bool:
    """Refuse, before anything is loaded, what cannot fit; says whether gradient checkpointing is needed to fit.

    A lower bound: five copies of the weights, the logits of the largest micro-batch twice, and what its layers keep
    for the backward, 34 s b h bytes each in half precision (arXiv 2205.05198, equation 1, attention recomputed).
    """
    config = outline.config.get_text_config()
    rows = max(entry.end_row - entry.first_row for entry in bundle.layout)
    length = bundle.tensors["input_ids"].shape[1]
    tokens = rows * length
    weights = 4 * _NUM_COPIES * sum(param.numel() for param in outline.parameters()) // dist.get_world_size()
    logits = 2 * tokens * outline.get_input_embeddings().num_embeddings * dtype.itemsize
    layer = 17 * tokens * config.hidden_size * dtype.itemsize
    kept = tokens * config.hidden_size * dtype.itemsize  # per layer, with gradient checkpointing
    num_layers = config.num_hidden_layers
    free = _free_bytes()
    if weights + logits + num_layers * layer <= free:
        return False
    needed = weights + logits + num_layers * kept + layer
    if needed > free:
        raise ReplayError(
            f"A micro-batch of {rows} x {length} tokens and this model need at least {_size(needed)} per process, and "
            f"{_size(free)} are free: use more processes (torchrun) or a larger machine."
        )
    return True


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _free_bytes() -> int:
    """What one of this machine's processes may take."""
    name = get_device_name()
    return free_bytes(torch.device(name)) // (int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if name == "cpu" else 1)
