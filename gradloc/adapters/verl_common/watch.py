# SPDX-License-Identifier: Apache-2.0
"""What rides along with a model's updates on a rank: the localizer and the stabilizers, and what they ask of verl."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...loop.localizer import Localizer
from ...loop.wire import Policy, RankReport
from ...loop.writer import events_weights_folder
from ...stabilize.stabilizer import Stabilizer
from ...touched import replaced
from .weights import save_weights


class Watch:
    """The parts that are on, called in the order of the methods.

    It is also what the localizer asks of verl: :class:`~...loop.localizer.ActorPowers`. An adapter says where verl
    keeps the model, its optimizer, its fp16 scaler and its bound on the norm.
    """

    takes_what_is_not_finite = False
    module: Any
    optimizer: Any
    scaler: Any
    grad_clip: Any

    def __init__(self, settings: Any, ranks: Ranks):
        self.settings, self.ranks = settings, ranks
        self.localizer = Localizer(self, ranks, settings) if settings.enable else None
        self.stabilizer = Stabilizer(settings.stabilize, self.grad_clip) if settings.stabilize.is_on else None
        self.weigher = None if self.stabilizer is None else self.stabilizer.weigher

    def clip_by_verl(self) -> torch.Tensor:
        """Clip ``.grad`` as verl does; returns the norm before, a scalar."""
        raise NotImplementedError

    def make_space(self, ranks: Ranks | None) -> GradientSpace:
        """The gradient; ``ranks`` hear of it when one fails in its own part of a sum."""
        return GradientSpace(self.module, ranks)

    def begin(self, policy: Policy | None) -> None:
        """Before the first micro-batch of an update; None where the trainer has sent no policy."""
        if self.localizer is not None:
            self.localizer.begin_update(policy, self.make_space(self.ranks))
        if self.stabilizer is not None:
            stage, learned = ("", None) if policy is None else (policy.stage or "", policy.learned)
            self.stabilizer.begin_update(self.make_space(None), stage, learned)

    def after_backward(self) -> None:
        """After a micro-batch's backward."""
        if self.localizer is not None:
            self.localizer.after_backward()

    def before_step(self) -> torch.Tensor:
        """Clip, look, and settle what the step takes; returns the norm before clipping, a scalar."""
        norm = self.clip()
        if self.localizer is not None:
            norm = self.localizer.before_step(norm)
        return norm if self.stabilizer is None else self.stabilizer.before_step(norm)

    def end(self, metrics: dict[str, Any]) -> None:
        """After the update: add the metrics that every rank has alike."""
        if self.localizer is not None:
            self.localizer.end_update()
        if self.stabilizer is not None:
            self.stabilizer.end_update(metrics)

    def report(self) -> RankReport:
        """What this process has to say of the last update."""
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
        """With ``layer_clip`` nothing is clipped before localization has looked, and the norm is measured instead."""
        return self.stabilizer.measure() if self._only_measures else self.clip_by_verl()

    def save_weights(self, global_step: int) -> str | None:
        folder = events_weights_folder(self.settings, global_step, self.ranks)
        return folder if folder is not None and save_weights(self.module, folder, self.ranks) else None

    @property
    def _only_measures(self) -> bool:
        return self.stabilizer is not None and self.stabilizer.clips_layers


class Clipping:
    """verl's own clipping, and something else in its place for a while.

    Args:
        holder: the module of verl's that clips: FSDP1 by the model's method, FSDP2 by a function that it has imported.
    """

    def __init__(self, holder: ModuleType):
        self._holder, self._of_fsdp2 = holder, holder.fsdp2_clip_grad_norm_

    def clip(self, module: torch.nn.Module, limit: float) -> torch.Tensor:
        """As verl does; the norm before, a scalar."""
        if isinstance(module, FSDP1):
            norm = type(module).clip_grad_norm_(module, limit)
        else:
            norm = self._of_fsdp2(module.parameters(), max_norm=limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def replaced(self, module: torch.nn.Module, instead: Callable[[], torch.Tensor]) -> Iterator[None]:
        """While verl clips and then steps: look in between."""
        of_fsdp1 = {"clip_grad_norm_": lambda max_norm: instead()} if isinstance(module, FSDP1) else {}
        of_fsdp2 = {"fsdp2_clip_grad_norm_": lambda parameters, max_norm: instead()}
        with replaced(module, **of_fsdp1), replaced(self._holder, **of_fsdp2):
            yield
