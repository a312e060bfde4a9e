# SPDX-License-Identifier: Apache-2.0
"""Run localizer and stabilizers around a model's updates on a rank, and call the parts of verl that they need."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from verl import DataProto

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...loop.localizer import Localizer
from ...loop.messages import Policy, RankReport
from ...loop.writer import keep_weights
from ...private_api import replaced
from ...stabilize.stabilizer import Stabilizer


class ActorWatch:
    """Calls the localizer and the stabilizers, those that are on. Its methods are in the order of their calls.

    It is also the localizer's handle on verl: :class:`~...loop.localizer.TrainerHandle`. An adapter says where verl
    keeps the model, its optimizer, its fp16 scaler and its bound on the norm.
    """

    takes_what_is_not_finite = False
    is_unclipped = False
    module: Any
    optimizer: Any
    scaler: Any
    grad_clip: Any
    clipping: "Clipping"
    step: Any = None
    """The mini-batch whose forwards are recorded for a search; None outside of one."""

    def __init__(self, settings: Any, ranks: Ranks):
        self.settings, self.ranks = settings, ranks
        self.localizer = Localizer(self, ranks, settings) if settings.enable else None
        self.stabilizer = Stabilizer(settings.stabilize, self.grad_clip, ranks) if settings.stabilize.is_on else None
        self.weigher = None if self.stabilizer is None else self.stabilizer.weigher

    def clip_by_verl(self) -> torch.Tensor:
        """Clip ``.grad`` as verl does; returns the norm before, a scalar."""
        return self.clipping.clip(self.module, self.grad_clip)

    def make_space(self, ranks: Ranks | None) -> GradientSpace:
        """Return the trained parameters; with ``ranks`` all of them learn if one fails in its part of a sum."""
        return GradientSpace(self.module, ranks)

    def begin(self, policy: Policy | None) -> None:
        """Begin an update, before its first micro-batch; the policy is None where the trainer sent none."""
        if self.localizer is not None:
            self.localizer.begin_update(policy, self.make_space(self.ranks))
        if self.stabilizer is not None:
            stage, learned = ("", None) if policy is None else (policy.stage or "", policy.learned)
            self.stabilizer.begin_update(self.make_space(None), stage, learned)

    def after_backward(self) -> None:
        """Track the gradient after a micro-batch's backward."""
        if self.localizer is not None:
            self.localizer.after_backward()

    def before_step(self) -> torch.Tensor:
        """Clip, look into a spike, and decide which gradient the step takes; returns the norm before clipping."""
        norm = self.clip()
        try:
            if self.localizer is not None:
                norm = self.localizer.before_step(self.localizer.decided_norm(norm))
        finally:
            self.step = None
        return norm if self.stabilizer is None else self.stabilizer.before_step(norm)

    def end(self, metrics: dict[str, Any]) -> None:
        """End an update, and add the stabilizers' metrics, which are the same on every rank."""
        if self.localizer is not None:
            self.localizer.end_update()
        if self.stabilizer is not None:
            self.stabilizer.end_update(metrics)

    def report(self) -> RankReport:
        """Report on the last update."""
        learned = None if self.stabilizer is None else self.stabilizer.state()
        if self.localizer is None:
            return RankReport(self.ranks.process, learned=learned)
        return self.localizer.report(learned)

    # ---- what the localizer asks of verl

    @property
    def clip_limit(self) -> float:
        return math.inf if self._only_measures else self.grad_clip

    @property
    def scales_loss(self) -> bool:
        return self.scaler is not None

    def clip(self) -> torch.Tensor:
        """Clip; with ``layer_clip`` only measure the norm, since layers are clipped after localization."""
        return self.stabilizer.measure() if self._only_measures else self.clip_by_verl()

    def save_weights(self, global_step: int) -> str | None:
        gather, write = partial(sharded_weights, self.module), partial(write_weights, self.module, self.ranks)
        return keep_weights(self.settings, global_step, self.ranks, gather, write)

    @property
    def _only_measures(self) -> bool:
        return self.stabilizer is not None and self.stabilizer.clips_layers


class Clipping:
    """Calls verl's own clipping, and puts a function of ours in its place: the model's method for FSDP1, for FSDP2 a
    function that verl's module ``holder`` imports."""

    def __init__(self, holder: ModuleType):
        self._holder, self._fsdp2_clip = holder, holder.fsdp2_clip_grad_norm_

    def clip(self, module: torch.nn.Module, limit: float) -> torch.Tensor:
        """Clip as verl does; returns the norm before, a scalar."""
        if isinstance(module, FSDP1):
            norm = type(module).clip_grad_norm_(module, limit)
        else:
            norm = self._fsdp2_clip(module.parameters(), max_norm=limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextlib.contextmanager
    def replaced(self, module: torch.nn.Module, instead: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Replace verl's clipping in its optimizer step, so that a spike is looked into before the step."""
        fsdp1 = {"clip_grad_norm_": lambda max_norm: instead()} if isinstance(module, FSDP1) else {}
        fsdp2 = {"fsdp2_clip_grad_norm_": lambda parameters, max_norm: instead()}
        with replaced(module, **fsdp1), replaced(self._holder, **fsdp2):
            yield


def sharded_weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return this rank's shards of FSDP's weights; all ranks call this together."""
    settings = ShardedStateDictConfig(offload_to_cpu=next(module.parameters()).device.type != "cpu")
    kind = FSDP1.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, settings)
    with kind if isinstance(module, FSDP1) else contextlib.nullcontext():
        return module.state_dict()


def write_weights(module: torch.nn.Module, ranks: Ranks, folder: str, state: dict[str, Any]) -> None:
    """Write this rank's shards, and on the first process the files by which verl's readers join them.

    verl's own writer ends in a barrier, where every rank would wait for one whose disk is full. So its files for
    ``save_contents=[model]`` are written here; each node writes to its own file system, as with verl's checkpoints.
    """
    size, version = ranks.num_processes, 1 if isinstance(module, FSDP1) else 2
    os.makedirs(folder, exist_ok=True)
    torch.save(state, os.path.join(folder, f"model_world_size_{size}_rank_{dist.get_rank()}.pt"))
    if ranks.is_first:
        unwrapped: Any = module._fsdp_wrapped_module if version == 1 else module
        unwrapped.config.save_pretrained(os.path.join(folder, "huggingface"))
        with open(os.path.join(folder, "fsdp_config.json"), "w", encoding="utf-8") as file:
            json.dump({"FSDP_version": version, "world_size": size}, file)


_KEY = "gradloc_report_"


def answers_of(group: Any, path: str) -> list[Any]:
    """Return the value at this path of each worker in verl's group, or what a method there returns, in the processes'
    order."""

    def ask(worker: Any) -> DataProto:
        found = attrgetter(path)(worker)
        # under the process' own key: of several answers with the same key verl keeps one
        return DataProto(meta_info={f"{_KEY}{dist.get_rank()}": found() if callable(found) else found})

    answers = group.execute_with_func_generator(ask).meta_info
    by_process = {int(key.removeprefix(_KEY)): value for key, value in answers.items() if key.startswith(_KEY)}
    return [by_process[process] for process in sorted(by_process)]
