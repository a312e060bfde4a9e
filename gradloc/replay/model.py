# SPDX-License-Identifier: Apache-2.0
"""The event's model, as transformers has it, from a folder of its own or from a checkpoint of verl's FSDP workers."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..core.memory import memory_of
from .bundle import Bundle, ReplayError, check

_NUM_COPIES = 5  # of the weights in float32: weights, gradient, the gradient set aside, the weights' copy, a residual


def load(path: str, bundle: Bundle, device: torch.device) -> Any:
    """transformers' model in training mode: weights and gradients in float32, the forward in the run's dtype.

    Args:
        path: a Hugging Face model folder, or a checkpoint folder of verl's FSDP workers.
        bundle: whose tokens it has to know.
        device: where it goes; its memory has to hold a search.

    Raises:
        ReplayError: it cannot be loaded, is not the event's, or would not fit.
    """
    try:
        folder, is_checkpoint = _find(Path(path), "critic" if bundle.is_critics else "actor")
        model = _load(folder, is_checkpoint, bundle, device).train().to(device)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, AssertionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReplayError(f"The model at {path} cannot be loaded: {first}") from error
    if device.type != "cpu":  # memory is short there; the layers run again in the backward, on the same numbers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if bundle.dtype != torch.float32:  # rounded weights, as under the trainers' FSDP; this process is all of the group
        if not dist.is_initialized():
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=bundle.dtype, reduce_dtype=torch.float32))
    return model


def _find(path: Path, name: str) -> tuple[Path, bool]:
    """Return the folder to load from, and whether it is a checkpoint of verl's FSDP workers."""
    for folder in (path, path / name):
        if (folder / "fsdp_config.json").is_file() and (folder / "huggingface" / "config.json").is_file():
            return folder, True
    kinds = "a Hugging Face model folder (config.json) nor a checkpoint folder of verl's FSDP workers"
    check((path / "config.json").is_file(), f"{path} is neither {kinds} (global_step_N/{name} with fsdp_config.json).")
    return path, False


def _load(folder: Path, is_checkpoint: bool, bundle: Bundle, device: torch.device) -> Any:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()  # next to our own
    safe = {"trust_remote_code": False}  # a stranger's folder may bring code
    home = folder / "huggingface" if is_checkpoint else folder
    config = hf.AutoConfig.from_pretrained(home, local_files_only=True, **safe)
    kind: Any = hf.AutoModelForTokenClassification if bundle.is_critics else hf.AutoModelForCausalLM
    if not bundle.is_critics and type(config) in hf.AutoModelForImageTextToText._model_mapping:
        kind = hf.AutoModelForImageTextToText
    with torch.device("meta"):
        outline = kind.from_config(config, **safe)
    size, (least, most) = outline.get_input_embeddings().num_embeddings, bundle.tensors["input_ids"].aminmax()
    knows = f"it knows tokens 0 to {size - 1}, and the bundle holds token {most if most >= size else least}"
    check(0 <= least <= most < size, f"The model at {folder} is not the event's: {knows}.")
    needed, free = 4 * _NUM_COPIES * sum(p.numel() for p in outline.parameters()), memory_of(device).free
    said = f"need {needed / 2**30:.3g} GiB on {device.type}, and {free / 2**30:.3g} GiB are free"
    check(needed <= free, f"The model's weights and gradients alone {said}: use a larger machine.")
    if is_checkpoint:
        model = kind.from_config(config, **safe).float()
        keys = model.load_state_dict(_joined_shards(folder), strict=False)
        apart = {*keys.missing_keys, *keys.unexpected_keys}
    else:
        given: dict[str, Any] = {"local_files_only": True, "output_loading_info": True, "dtype": torch.float32}
        model, info = kind.from_pretrained(folder, **given, **safe)
        apart = {*info["missing_keys"]}
    apart -= {*(getattr(model, "_tied_weights_keys", None) or ())}
    if apart:
        raise ValueError(f"its config and its weights do not agree on {min(apart)}")
    return model


def _joined_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights, in the shards' own precision: verl's merger would round them to bfloat16."""
    paths = sorted(folder.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    shards = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    whole = {}
    for name, first in (shards[0] if shards else {}).items():
        parts, dim = [shard[name] for shard in shards], 0
        if isinstance(first, DTensor):  # the last mesh dimension is the sharded one, the others hold copies
            placement, parts = first.placements[-1], [part._local_tensor for part in parts]
            dim = placement.dim if placement.is_shard() else 0
            parts = parts[: first.device_mesh.shape[-1] if placement.is_shard() else 1]
        whole[name] = torch.cat(parts, dim)
    return whole
