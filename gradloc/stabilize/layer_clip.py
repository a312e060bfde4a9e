# SPDX-License-Identifier: Apache-2.0
"""Clip each layer against its own recent norms. Plain arithmetic over norms; nothing here measures.

A global clip scales every layer by one factor, so a single layer that spikes S-fold among L equal ones shrinks the
others to 1 / sqrt(1 + (S^2 - 1) / L) of their size. Here only what is far off its own history is scaled. The published
LayerClip rule is not public; these are ours, after AdaGC (Wang et al., arXiv:2502.11034).

Both rules learn the norms as they were taken, after clipping: so a spike moves them by no more than what it was
allowed, and the step size goes on without a jump from the warm-up, which has verl's global clip.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from ..core.history import History
from .config import LayerClipConfig

_CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


class _Rule(Protocol):
    """How large a layer's norm may be, by what it was."""

    def limit(self, layer: str) -> float | None:
        """The largest norm that is left as it is; None for a layer without statistics."""

    def learn(self, layer: str, norm: float, is_warming_up: bool, is_clipped: bool) -> None:
        """Take in one norm, finite and above 0, as it is after clipping."""

    def state(self) -> dict[str, Any]:
        """JSON-ready content."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave."""


class _AdaGC:
    """A factor over the exponential moving average of the layer's clipped norms; their running minimum in the warm-up
    (AdaGC, arXiv:2502.11034, algorithm 1)."""

    def __init__(self, settings: LayerClipConfig):
        self._factor, self._beta = settings.relative_factor, settings.beta
        self._averages: dict[str, float] = {}

    def limit(self, layer: str) -> float | None:
        average = self._averages.get(layer)
        return None if average is None else self._factor * average

    def learn(self, layer: str, norm: float, is_warming_up: bool, is_clipped: bool) -> None:
        average = self._averages.get(layer, norm)
        learned = min(average, norm) if is_warming_up else self._beta * average + (1 - self._beta) * norm
        self._averages[layer] = learned

    def state(self) -> dict[str, Any]:
        return dict(self._averages)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = {layer: float(average) for layer, average in state.items()}


class _ZScore:
    """Robust standard deviations of the log-norm over its median, as the spike trigger counts them."""

    def __init__(self, settings: LayerClipConfig):
        self._settings = settings
        self._histories: dict[str, History] = {}

    def limit(self, layer: str) -> float | None:
        history = self._histories.get(layer)
        return None if history is None else history.threshold()

    def learn(self, layer: str, norm: float, is_warming_up: bool, is_clipped: bool) -> None:
        history = self._histories.setdefault(layer, self._new())
        history.observe(norm, is_spike=is_clipped and not is_warming_up)

    def state(self) -> dict[str, Any]:
        return {layer: history.state() for layer, history in self._histories.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        histories = {layer: self._new() for layer in state}
        for layer, history in histories.items():
            history.load_state(state[layer])
        self._histories = histories

    def _new(self) -> History:
        # one norm is enough for it: how long the warm-up lasts is this module's business
        return History(self._settings.window, 1, self._settings.num_deviations)


_RULES = {"adagc": _AdaGC, "zscore": _ZScore}


class LayerClip:
    """The factors for one optimizer step after the other.

    Args:
        settings: ``rule`` is not ``off``.
        grad_clip: verl's bound on the global norm: in force in the warm-up, and later for a layer whose gradient was
            always 0 until now.
    """

    def __init__(self, settings: LayerClipConfig, grad_clip: float):
        self._settings = settings
        self._grad_clip = grad_clip
        self._rule: _Rule = _RULES[settings.rule](settings)
        self._num_steps = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step still gets the global clip."""
        return self._num_steps < self._settings.warmup

    def clip(self, norms: Mapping[str, float]) -> dict[str, float]:
        """The factor for each layer's gradient in the step that is about to be taken; learns from it.

        Args:
            norms: norm per layer before clipping, all finite. A layer of norm 0 (an expert that no token was sent to)
                is not learned from: as a minimum it would stop the layer for good.

        Returns:
            A factor per layer, in (0, 1]; exactly 1 for what is left as it is.
        """
        is_warming_up = self.is_warming_up
        if is_warming_up:
            total = math.sqrt(sum(norm * norm for norm in norms.values()))
            factors = dict.fromkeys(norms, self._factor(self._grad_clip, total + _CLIP_EPS))
        else:
            factors = {layer: self._factor(self._limit(layer), norm) for layer, norm in norms.items()}
        self._num_steps += 1
        for layer, norm in norms.items():
            if norm > 0:
                self._rule.learn(layer, factors[layer] * norm, is_warming_up, factors[layer] < 1)
        return factors

    def _limit(self, layer: str) -> float:
        limit = self._rule.limit(layer)
        return self._grad_clip if limit is None else limit

    @staticmethod
    def _factor(limit: float, norm: float) -> float:
        return limit / norm if norm > limit else 1.0

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint."""
        kind = {"rule": self._settings.rule, "group": self._settings.group}
        return {**kind, "num_steps": self._num_steps, "layers": self._rule.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave.

        Raises:
            ValueError: it is another rule's, or another grouping's.
        """
        for key, ours in (("rule", self._settings.rule), ("group", self._settings.group)):
            if state[key] != ours:
                raise ValueError(f"layer_clip.{key} is {ours} now, and the checkpoint's statistics are of {state[key]}")
        num_steps = int(state["num_steps"])
        self._rule.load_state(state["layers"])
        self._num_steps = num_steps
