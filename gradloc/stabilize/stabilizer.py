# SPDX-License-Identifier: Apache-2.0
"""What a trainer's actor calls: the stabilizers on the real gradient, sharded as it is.

Every rank decides alike without asking: the norms come out of one reduction, and the statistics follow from them.
With ``layer_clip`` that reduction replaces verl's own, nothing is clipped before localization has looked, and what is
clipped is what localization decided to take. The layers learn from steps that are taken only. Lopti's two stages
have gradients of different size: each learns from its own.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.gradients import GradientSpace
from ..loop.layers import kind_of, layer_of, norms_by
from .config import StabilizeConfig
from .layer_clip import LayerClip
from .ratio_clip import TokenWeigher
from .skip_step import SkipStep

logger = logging.getLogger(__name__)


def _tensor_of(name: str) -> str:
    """A parameter's name whatever wraps its module."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


_GROUPS = {"layer": layer_of, "kind": kind_of, "tensor": _tensor_of}


class Stabilizer:
    """The stabilizers of one actor, called at its seams in the order of the methods."""

    def __init__(self, settings: StabilizeConfig, grad_clip: float):
        self.settings, self._grad_clip = settings, grad_clip
        self.weigher = TokenWeigher(settings) if settings.weighs_tokens else None
        """Weighs the token losses; None where nothing does."""
        self._group = _GROUPS[settings.layer_clip.group]
        self._by_stage: dict[str, dict[str, Any]] = {}
        self._turn_to("")
        self._space: GradientSpace
        self._squares: torch.Tensor
        self._metrics: dict[str, list[float]] = {}
        self._num_nonfinite = 0
        self._num_skipped = 0

    @property
    def clips_layers(self) -> bool:
        """Whether :meth:`measure` stands in for verl's clipping."""
        return self._layer_clip is not None

    def begin_update(self, space: GradientSpace, stage: str, learned: dict[str, Any] | None) -> None:
        """Prepare for an update.

        Args:
            space: the actor's parameters.
            stage: which of Lopti's two updates this is; "" for the only one.
            learned: statistics from a checkpoint, on the first update after a resume.
        """
        self._turn_to(stage)
        self._space = space
        self._metrics, self._num_nonfinite, self._num_skipped = {}, 0, 0
        if learned is not None:
            self._load_state(learned)

    def measure(self) -> torch.Tensor:
        """Norm of the gradient in ``.grad``, which stays as it is; one reduction for all layers.

        Returns:
            float64 scalar, the same on every rank; NaN or inf when an element is not finite.
        """
        self._squares = self._space.squares()
        return self._squares.sum().sqrt()

    def before_step(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Skip the step, or clip its layers, in place; learns from it.

        Args:
            grad_norm: scalar, of the gradient that the step would take, before clipping. 0: there is none (the action
                on a spike took it away), so there is nothing to do or to learn. Not finite: verl takes no step.

        Returns:
            ``grad_norm``: what is reported is the norm before clipping, also of a step that is skipped.
        """
        norm = float(grad_norm)
        is_step = math.isfinite(norm) and norm > 0
        threshold = None if self._skip_step is None else self._skip_step.threshold()
        if is_step and self._skip_step is not None and self._skip_step.is_outlier(norm):
            # without gradients the optimizer skips every parameter: no moment, no weight decay, no step count
            self._space.clear()
            self._num_skipped += 1
            is_step = False
        if self._skip_step is not None:
            self._note("skip_step/threshold", threshold or 0.0)
        if self._layer_clip is not None:
            self._clip_layers(is_step)
        return grad_norm

    def _clip_layers(self, is_step: bool) -> None:
        norms = norms_by(self._group, self._space.names, self._squares)
        self._num_nonfinite += sum(not math.isfinite(norm) for norm in norms.values())
        factors = self._layer_clip.clip(norms) if is_step else dict.fromkeys(norms, 1.0)
        self._space.scale_each([factors[self._group(name)] for name in self._space.names])
        after = math.sqrt(sum((factors[layer] * norm) ** 2 for layer, norm in norms.items())) if is_step else 0.0
        self._note("layer_clip/share", sum(factor < 1 for factor in factors.values()) / len(factors))
        self._note("layer_clip/scale_min", min(factors.values()))
        self._note("layer_clip/norm_after", after)

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add what every rank reports alike."""
        if self._layer_clip is not None:
            self._metrics["gradloc/layer_clip/nonfinite"] = [self._num_nonfinite]
            self._metrics["gradloc/layer_clip/warmup"] = [float(self._layer_clip.is_warming_up)]
        if self._skip_step is not None:
            self._metrics["gradloc/skip_step/skipped"] = [self._num_skipped]
        metrics.update(self._metrics)
        self.__dict__.pop("_squares", None)
        del self._space

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep a micro-batch's or an optimizer step's numbers, to be added with the update's."""
        for name, value in metrics.items():
            self._metrics.setdefault(name, []).append(value)

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the next checkpoint: what was learned, the same on every rank."""
        return {stage: {name: part.state() for name, part in parts.items()} for stage, parts in self._by_stage.items()}

    # ---- inside

    def _note(self, name: str, value: float) -> None:
        self.note({f"gradloc/{name}": value})

    def _turn_to(self, stage: str) -> None:
        """Go on with what was learned from this stage of Lopti's; "" is the only stage of an ordinary update."""
        parts = self._parts(stage)
        self._layer_clip: LayerClip | None = parts.get("layer_clip")
        self._skip_step: SkipStep | None = parts.get("skip_step")

    def _parts(self, stage: str) -> dict[str, Any]:
        """What learns and is on, for one stage."""
        if stage not in self._by_stage:
            settings, parts = self.settings, {}
            if settings.layer_clip.rule != "off":
                parts["layer_clip"] = LayerClip(settings.layer_clip, self._grad_clip)
            if settings.skip_step.enable:
                parts["skip_step"] = SkipStep(settings.skip_step)
            self._by_stage[stage] = parts
        return self._by_stage[stage]

    def _load_state(self, state: dict[str, Any]) -> None:
        for stage, of_stage in state.items():
            for name, part in self._parts(stage).items():
                try:
                    part.load_state(of_stage[name])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    logger.warning(
                        "gradloc: %s starts without history, since the checkpoint's statistics do not fit (%r)",
                        name,
                        error,
                    )
