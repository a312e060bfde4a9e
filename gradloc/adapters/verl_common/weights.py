# SPDX-License-Identifier: Apache-2.0
"""The weights that an event happened at, in the layout of verl's own checkpoints.

verl's writer has a barrier behind its writing, where every rank would wait for one whose disk is full. So what it
writes for ``save_contents=[model]`` is written here, with nothing to wait for until all ranks know how it went.
"""

import contextlib
import json
import logging
import os
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

from ...core.ranks import PeerFailure, Ranks

logger = logging.getLogger(__name__)


def save_weights(module: torch.nn.Module, folder: str, ranks: Ranks) -> bool:
    """Write this rank's shards, and on the first process what tells verl's readers how to put them together.

    Args:
        module: under FSDP1 or FSDP2.
        folder: absolute; each node writes to its own file system, as with verl's checkpoints.
        ranks: all of them call this together.

    Returns:
        Whether every rank has written; where one has not, the others delete what they wrote.
    """
    size, rank = ranks.num_processes, torch.distributed.get_rank()
    path = os.path.join(folder, f"model_world_size_{size}_rank_{rank}.pt")
    version = 1 if isinstance(module, FSDP1) else 2

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, path)
        if ranks.is_first:
            unwrapped: Any = module._fsdp_wrapped_module if version == 1 else module
            unwrapped.config.save_pretrained(os.path.join(folder, "huggingface"))
            with open(os.path.join(folder, "fsdp_config.json"), "w", encoding="utf-8") as file:
                json.dump({"FSDP_version": version, "world_size": size}, file)

    settings = ShardedStateDictConfig(offload_to_cpu=next(module.parameters()).device.type != "cpu")
    kind = FSDP1.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, settings)
    try:
        with kind if version == 1 else contextlib.nullcontext():
            state = ranks.together(module.state_dict)
        ranks.agree(write)
    except PeerFailure:
        logger.exception("gradloc: the weights of this event are not kept: %s could not be written on some rank", path)
        with contextlib.suppress(OSError):
            os.remove(path)
        return False
    return True
