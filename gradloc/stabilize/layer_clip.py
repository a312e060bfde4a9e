# SPDX-License-Identifier: Apache-2.0
"""Decide how far to clip each layer, by its own recent norms. Plain arithmetic: norms are measured elsewhere.

A global clip scales every layer by one factor, so a single layer that spikes S-fold among L equal ones shrinks the
others to 1 / sqrt(1 + (S^2 - 1) / L) of their size. Here only what is far off its own history is scaled. The published
LayerClip rule is not public. These rules are ours, after AdaGC (Wang et al., arXiv:2502.11034).

Both rules learn the norms after clipping. So a spike moves them by no more than its clipped norm, and the step size
does not jump at the end of the warm-up, in which verl's global clip is in force.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..trigger.history import NormHistory
from .config import LayerClipConfig

_CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


class _Average:
    """Limits a layer by a factor over the exponential moving average of its clipped norms, in the warm-up over their
    running minimum (AdaGC, arXiv:2502.11034, algorithm 1)."""

    def __init__(self, settings: LayerClipConfig):
        self._factor, self._beta = settings.relative_factor, settings.beta
        self._average = math.inf

    def limit(self) -> float:
        """Return the largest norm that is not clipped."""
        return self._factor * self._average

    def learn(self, norm: float, is_warming_up: bool, is_clipped: bool) -> None:
        """Take in one norm after clipping, finite and above 0."""
        if is_warming_up or self._average == math.inf:
            self._average = min(self._average, norm)
        else:
            self._average = self._beta * self._average + (1 - self._beta) * norm

    def state(self) -> float:
        return self._average

    def load_state(self, state: float) -> None:
        self._average = float(state)


class _LogNorms(NormHistory):
    """Limits a layer by robust standard deviations of its log-norm over the median, as the spike trigger does."""

    def __init__(self, settings: LayerClipConfig):
        # one norm is enough for a threshold: LayerClip counts the warm-up itself
        super().__init__(settings.window, 1, settings.num_deviations)

    def limit(self) -> float | None:
        return self.threshold()  # None while every norm so far was clipped

    def learn(self, norm: float, is_warming_up: bool, is_clipped: bool) -> None:
        self.observe(norm, is_spike=is_clipped and not is_warming_up)


class LayerClip:
    """Computes each layer's clipping factor, step by step.

    Args:
        settings: ``rule`` is not ``off``.
        grad_clip: verl's limit on the global norm. It is in force in the warm-up, and later for a layer whose gradient
            was always 0 before.
    """

    def __init__(self, settings: LayerClipConfig, grad_clip: float):
        self._settings, self._grad_clip = settings, grad_clip
        self._layers: dict[str, _Average | _LogNorms] = {}
        self._num_steps = 0

    def _make_statistics(self) -> _Average | _LogNorms:
        return _Average(self._settings) if self._settings.rule == "adagc" else _LogNorms(self._settings)

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step still gets the global clip."""
        return self._num_steps < self._settings.warmup

    def clip(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Return the factor on each layer's gradient in the step that is about to be taken, and learn from the step.

        Args:
            norms: norm per layer before clipping, all finite. A norm of 0 (an expert that no token was sent to) is not
                learned: as a running minimum it would stop the layer for good.

        Returns:
            A factor per layer, in (0, 1]; exactly 1 for what is not clipped.
        """
        is_warming_up = self.is_warming_up
        if is_warming_up:
            total = math.sqrt(sum(norm * norm for norm in norms.values()))
            factors = dict.fromkeys(norms, _factor(self._grad_clip, total + _CLIP_EPS))
        else:
            limits = {layer: statistics.limit() for layer, statistics in self._layers.items()}
            factors = {layer: _factor(limits.get(layer) or self._grad_clip, norm) for layer, norm in norms.items()}
        self._num_steps += 1
        for layer, norm in norms.items():
            if norm > 0:
                statistics = self._layers.setdefault(layer, self._make_statistics())
                statistics.learn(factors[layer] * norm, is_warming_up, factors[layer] < 1)
        return factors

    def state(self) -> dict[str, Any]:
        """Return what the checkpoint keeps, ready for JSON."""
        kind = {"rule": self._settings.rule, "group": self._settings.group}
        layers = {layer: statistics.state() for layer, statistics in self._layers.items()}
        return {**kind, "num_steps": self._num_steps, "layers": layers}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` gave.

        Raises:
            ValueError: the state is of another rule or grouping.
        """
        for key, ours in (("rule", self._settings.rule), ("group", self._settings.group)):
            if state[key] != ours:
                raise ValueError(f"layer_clip.{key} is {ours} now, and the checkpoint's statistics are of {state[key]}")
        num_steps, layers = int(state["num_steps"]), {layer: self._make_statistics() for layer in state["layers"]}
        for layer, statistics in layers.items():
            statistics.load_state(state["layers"][layer])
        self._num_steps, self._layers = num_steps, layers


def _factor(limit: float, norm: float) -> float:
    """Return the factor that brings a norm down to a limit; 1 for one that is not above it."""
    return limit / norm if norm > limit else 1.0
