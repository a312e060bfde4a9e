# SPDX-License-Identifier: Apache-2.0
"""The stabilizers that a trainer's actor calls, on the real gradient and its shards.

Every rank decides alike: the norms come out of one reduction, the statistics follow from them, and whether to skip is
the first rank's decision. With ``layer_clip`` that reduction replaces verl's own clip: localization looks first, and
what it decides to take is clipped. Only steps that are taken teach the layers. Lopti's two stages have gradients of
different size, so each learns from its own.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.gradients import GradientSpace
from ..core.ranks import Ranks
from ..core.sharding import plain_name
from ..loop.layers import kind_of, layer_of, norms_by
from .config import StabilizeConfig
from .layer_clip import LayerClip
from .ratio_clip import TokenWeigher
from .skip_step import SkipStep

logger = logging.getLogger(__name__)


_GROUPS = {"layer": layer_of, "kind": kind_of, "tensor": plain_name}


class Stabilizer:
    """The stabilizers of one actor, which calls the methods in their order."""

    def __init__(self, settings: StabilizeConfig, grad_clip: float, ranks: Ranks | None = None):
        self.settings, self._grad_clip, self._ranks = settings, grad_clip, ranks
        self.weigher = TokenWeigher(settings) if settings.weighs_tokens else None
        """Weighs the token losses; None where nothing does."""
        self.clips_layers = settings.layer_clip.rule != "off"
        """Whether :meth:`measure` replaces verl's clipping."""
        self._group = _GROUPS[settings.layer_clip.group]
        self._by_stage: dict[str, dict[str, Any]] = {}
        """For each stage, what learns in it by name: ``layer_clip`` and ``skip_step``, where they are on."""

    def begin_update(self, space: GradientSpace, stage: str, learned: Mapping[str, Any] | None) -> None:
        """Prepare for an update.

        Args:
            space: the actor's parameters.
            stage: which of Lopti's two updates this is; "" for the only one.
            learned: statistics from a checkpoint, on the first update after a resume.
        """
        self._space = space
        self._metrics: dict[str, list[float]] = {}
        if learned is not None:
            self._load_state(learned)
        parts = self._parts_of(stage)
        self._layer_clip: LayerClip | None = parts.get("layer_clip")
        self._skip_step: SkipStep | None = parts.get("skip_step")
        self._num_nonfinite = self._num_skipped = 0

    def measure(self) -> torch.Tensor:
        """Return the norm of what is in ``.grad``, by one reduction for all layers.

        The layers' norms are kept for :meth:`before_step`.

        Returns:
            A float64 scalar, the same on every rank; NaN or inf when an element is not finite.
        """
        self._squares = self._space.squares()
        return self._squares.sum().sqrt()

    def before_step(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Skip the step, or clip its layers in place; learn from it.

        Args:
            grad_norm: scalar, of the gradient that the step would take, before clipping. 0: there is none (the action
                on a spike removed it), so there is nothing to do or to learn. Not finite: verl takes no step.

        Returns:
            ``grad_norm``: the trainer reports the norm before clipping, also of a skipped step.
        """
        norm = float(grad_norm)
        is_step = math.isfinite(norm) and norm > 0
        if self._skip_step is not None:
            self.note({"gradloc/skip_step/threshold": self._skip_step.threshold() or 0.0})
            if is_step and self._skip_step.is_outlier(norm, self._is_over):
                # without gradients the optimizer skips every parameter: no moment, no weight decay, no step count
                self._space.clear()
                self._num_skipped += 1
                is_step = False
        if self._layer_clip is not None:
            self._clip_layers(self._layer_clip, is_step)
        return grad_norm

    def _is_over(self, norm: float, limit: float) -> bool:
        """Return whether a norm is over the limit: the first rank's, where all train one model."""
        if self._ranks is None or not self._space.are_summed:
            return norm > limit
        return self._ranks.decided(norm, limit)[1]

    def _clip_layers(self, layer_clip: LayerClip, is_step: bool) -> None:
        """Scale each layer's gradient by its factor, 1 where no step is taken; note what that did."""
        norms = norms_by(self._group, self._space.names, self._squares)
        self._num_nonfinite += sum(not math.isfinite(norm) for norm in norms.values())
        factors = layer_clip.clip(norms) if is_step else dict.fromkeys(norms, 1.0)
        self._space.scale_each([factors[self._group(name)] for name in self._space.names])
        after = math.sqrt(sum((factors[layer] * norm) ** 2 for layer, norm in norms.items())) if is_step else 0.0
        self.note(
            {
                "gradloc/layer_clip/share": sum(factor < 1 for factor in factors.values()) / len(factors),
                "gradloc/layer_clip/scale_min": min(factors.values()),
                "gradloc/layer_clip/norm_after": after,
            }
        )

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep a micro-batch's or an optimizer step's numbers, to be added with the update's."""
        for name, value in metrics.items():
            self._metrics.setdefault(name, []).append(value)

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add the update's metrics, the same on every rank."""
        if self._layer_clip is not None:
            self._metrics["gradloc/layer_clip/nonfinite"] = [self._num_nonfinite]
            self._metrics["gradloc/layer_clip/warmup"] = [float(self._layer_clip.is_warming_up)]
        if self._skip_step is not None:
            self._metrics["gradloc/skip_step/skipped"] = [self._num_skipped]
        metrics.update(self._metrics)
        del self._space

    def state(self) -> dict[str, Any]:
        """Return what was learned, for the next checkpoint: ready for JSON, the same on every rank."""
        return {stage: {name: part.state() for name, part in parts.items()} for stage, parts in self._by_stage.items()}

    # ---- inside

    def _parts_of(self, stage: str) -> dict[str, Any]:
        """Return what learns and is on, for one stage."""
        if stage not in self._by_stage:
            parts: dict[str, Any] = {}
            if self.clips_layers:
                parts["layer_clip"] = LayerClip(self.settings.layer_clip, self._grad_clip)
            if self.settings.skip_step.enable:
                parts["skip_step"] = SkipStep(self.settings.skip_step)
            self._by_stage[stage] = parts
        return self._by_stage[stage]

    def _load_state(self, state: Mapping[str, Any]) -> None:
        for stage, learned in state.items():
            for name, part in self._parts_of(stage).items():
                try:
                    part.load_state(learned[name])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    logger.warning(
                        "gradloc: %s starts without history, since the checkpoint's statistics do not fit (%r)",
                        name,
                        error,
                    )
