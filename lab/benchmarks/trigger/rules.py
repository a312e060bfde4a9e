# SPDX-License-Identifier: Apache-2.0
"""The rules to compare. Each returns a threshold before every norm and observes the norm after it."""

import math
from collections import deque
from statistics import median

from gradloc.trigger import AdaptiveThreshold
from gradloc.trigger.history import NormHistory


class Rule:
    """The interface of a rule."""

    def threshold(self, position: int) -> float | None:
        """Return the threshold for the next norm, at this mini-batch position; None if there is none yet."""
        raise NotImplementedError

    def observe(self, norm: float) -> None:
        """Observe the next norm."""

    def end_step(self, norms: list[float]) -> None:
        """End a trainer step, which had these norms."""


class Adaptive(Rule):
    """This project's rule."""

    def __init__(self):
        self._rule = AdaptiveThreshold()

    def threshold(self, position: int) -> float | None:
        return self._rule.threshold(position)

    def end_step(self, norms: list[float]) -> None:
        self._rule.observe(norms)


class Pooled(Rule):
    """The previous rule: median + 6 robust deviations of the log-norm, all mini-batches in one history."""

    def __init__(self):
        self._history, self._threshold = NormHistory(window=128, warmup=16, num_deviations=6.0), None

    def threshold(self, position: int) -> float | None:
        return self._threshold

    def end_step(self, norms: list[float]) -> None:
        for norm in norms:
            self._history.observe(norm, self._threshold is not None and norm > self._threshold)
        self._threshold = self._history.threshold()


class ZClip(Rule):
    """arXiv 2504.02507 with its defaults: z-score 2.5 over moving mean and variance (0.97), 25 steps of warm-up.

    A spike enters the averages clipped by the reciprocal rule, mean + 2.5^2 / z deviations.
    """

    def __init__(self, memory: float = 0.97, z_score: float = 2.5, warmup: int = 25):
        self._memory, self._z_score, self._warmup = memory, z_score, warmup
        self._first: list[float] = []
        self._mean = self._variance = math.nan

    def threshold(self, position: int) -> float | None:
        if len(self._first) < self._warmup:
            return None
        return self._mean + self._z_score * math.sqrt(self._variance)

    def observe(self, norm: float) -> None:
        if len(self._first) < self._warmup:
            self._first.append(norm)
            if len(self._first) == self._warmup:
                self._mean = sum(self._first) / self._warmup
                self._variance = sum((value - self._mean) ** 2 for value in self._first) / self._warmup
            return
        deviation = math.sqrt(self._variance)
        if norm > self._mean + self._z_score * deviation:
            z_score = (norm - self._mean) / (deviation + 1e-6)
            norm = self._mean + self._z_score**2 / z_score * deviation
        self._mean = self._memory * self._mean + (1 - self._memory) * norm
        self._variance = self._memory * self._variance + (1 - self._memory) * (norm - self._mean) ** 2


class SkipStep(Rule):
    """OLMo's skip-step optimizer (arXiv 2501.00656): mean + 6 standard deviations of the last 128 norms, once 64 are
    known. Only its test of the norm, without the one of the loss."""

    def __init__(self, window: int = 128, num_deviations: float = 6.0):
        self._norms: deque[float] = deque(maxlen=window)
        self._num_deviations = num_deviations

    def threshold(self, position: int) -> float | None:
        count = len(self._norms)
        if count < self._norms.maxlen // 2:
            return None
        mean = math.fsum(self._norms) / count
        variance = math.fsum((norm - mean) ** 2 for norm in self._norms) / (count - 1)
        return mean + self._num_deviations * math.sqrt(variance)

    def observe(self, norm: float) -> None:
        self._norms.append(norm)


class Multiple(Rule):
    """Ten times the median of the last 64 norms, including spikes."""

    def __init__(self, factor: float = 10.0, window: int = 64, warmup: int = 16):
        self._factor, self._warmup = factor, warmup
        self._norms: deque[float] = deque(maxlen=window)

    def threshold(self, position: int) -> float | None:
        return self._factor * median(self._norms) if len(self._norms) >= self._warmup else None

    def observe(self, norm: float) -> None:
        self._norms.append(norm)


RULES = {"gradloc": Adaptive, "before": Pooled, "ZClip": ZClip, "OLMo": SkipStep, "10 x median": Multiple}
