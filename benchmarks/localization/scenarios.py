# SPDX-License-Identifier: Apache-2.0
"""Spikes with known culprits: a healthy batch, and what was planted in it.

Sizes are in kappa: the norm of a culprit's gradient over the median norm of a healthy step.
Planting may look at exact gradients; nothing that searches sees anything of this but the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.bare import NUM_PROMPT, Amplified, Batch, Decoder, Oracle, Place

_THREE = (10.0, 6.0, 4.0)
_EIGHT = (10.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 4.0)


@dataclass
class Planted:
    """A spiked batch and who did it."""

    batch: Batch
    places: list[Place] = field(default_factory=list)
    """(row, position) of every culprit token."""


class Planter:
    """Plants culprits of a wanted size into one healthy batch.

    Args:
        model: unsharded, float32.
        batch: healthy.
        healthy_norm: the median norm of healthy steps.
        seed: of the places.
        least: kappa of those scenarios whose culprit is to be just loud enough.
    """

    def __init__(self, model: Decoder, batch: Batch, healthy_norm: float, seed: int, least: float = 4.0):
        self.model = model
        self.batch = batch
        self.healthy_norm = healthy_norm
        self.least = least
        self._generator = torch.Generator().manual_seed(1000 + seed)

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.batch.labels.shape)

    def draw(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self._generator))

    def rows(self, count: int) -> list[int]:
        """Different rows while there are enough."""
        order = torch.randperm(self.shape[0], generator=self._generator).tolist()
        return [order[number % len(order)] for number in range(count)]

    def place(self, row: int) -> Place:
        return row, self.draw(self.shape[1])

    def loud(self, batch: Batch, place: Place, kappa: float) -> Batch:
        """Set the token's advantage so that its gradient has norm kappa and its sign."""
        # ratio 1: the clip neither hides the token nor changes its size
        old = batch.old_log_probs.clone()
        old[place] = Oracle(self.model, batch).log_prob(place)
        advantages = batch.advantages.clone()
        advantages[place] = 1.0
        batch = batch.edited(advantages=advantages, old_log_probs=old)
        unit = Oracle(self.model, batch).norm(place)
        advantages = advantages.clone()
        advantages[place] = kappa * self.healthy_norm / unit
        return batch.edited(advantages=advantages)

    def copy_row(self, batch: Batch, source: int, target: int) -> Batch:
        """Two rows that read and answer the same: their tokens' gradients are parallel."""
        changes = {}
        for name in ("tokens", "labels", "old_log_probs"):
            value = getattr(batch, name).clone()
            value[target] = value[source]
            changes[name] = value
        return batch.edited(**changes)


def _loud(*kappas: float) -> Callable[[Planter], Planted]:
    def plant(planter: Planter) -> Planted:
        batch, places = planter.batch, []
        for row, kappa in zip(planter.rows(len(kappas)), kappas, strict=True):
            place = planter.place(row)
            while place in places:
                place = planter.place(row)
            sign = 1 if planter.draw(2) else -1
            batch = planter.loud(batch, place, sign * kappa)
            places.append(place)
        return Planted(batch, places)

    return plant


def _pair(first: float, second: float, *others: float) -> Callable[[Planter], Planted]:
    def plant(planter: Planter) -> Planted:
        one, two, *rest = planter.rows(2 + len(others))
        position = planter.draw(planter.shape[1])
        batch = planter.copy_row(planter.batch, one, two)
        places = [(one, position), (two, position)]
        batch = planter.loud(batch, places[0], first)
        batch = planter.loud(batch, places[1], -second)
        for row, kappa in zip(rest, others, strict=True):
            places.append(planter.place(row))
            batch = planter.loud(batch, places[-1], kappa)
        return Planted(batch, places)

    return plant


def _cluster(planter: Planter) -> Planted:
    """16 neighbours of one sequence, each kappa 3 with the same sign."""
    row, length = planter.draw(planter.shape[0]), planter.shape[1]
    start = planter.draw(length - 15)
    batch, places = planter.batch, [(row, start + number) for number in range(16)]
    for place in places:
        batch = planter.loud(batch, place, 3.0)
    return Planted(batch, places)


def _sequence(planter: Planter) -> Planted:
    """One row's advantage is too large: together its tokens have kappa 10."""
    row = planter.draw(planter.shape[0])
    norm = Oracle(planter.model, planter.batch).row_norm(row)
    advantages = planter.batch.advantages.clone()
    advantages[row] *= 10.0 * planter.healthy_norm / norm
    places = [(row, position) for position in range(planter.shape[1])]
    return Planted(planter.batch.edited(advantages=advantages), places)


def _rare(planter: Planter) -> Planted:
    """The response holds the model's least likely token there, with an advantage of kappa 4 or what is the least."""
    place = planter.place(planter.draw(planter.shape[0]))
    labels = planter.batch.labels.clone()
    labels[place] = Oracle(planter.model, planter.batch).logits(place).argmin()
    batch = planter.batch.edited(labels=labels)
    return Planted(planter.loud(batch, place, planter.least), [place])


def _amplified(planter: Planter, layers: tuple[int, ...]) -> Planted:
    """An ordinary token to which these layers' MLP weights react far too strongly (kappa 4, or the least).

    Nothing that the loss knows shows it: log-prob, advantage and coefficient are ordinary. It is
    the last position read, so that exactly one response token depends on it.
    """
    row, last = planter.draw(planter.shape[0]), planter.shape[1] - 1
    place = row, last
    old = planter.batch.old_log_probs.clone()
    old[place] = Oracle(planter.model, planter.batch).log_prob(place)
    advantages = planter.batch.advantages.clone()
    advantages[place] = 1.0 if advantages[place] >= 0 else -1.0
    batch = planter.batch.edited(advantages=advantages, old_log_probs=old)

    def with_factor(factor: float) -> Batch:
        where = Amplified(layers, row, NUM_PROMPT + last - 1, factor)
        return batch.edited(amplified=where)

    return Planted(_calibrated(planter, with_factor, place, planter.least), [place])


def _jacobian(planter: Planter) -> Planted:
    return _amplified(planter, tuple(range(len(planter.model.blocks))))


def _layer_local(planter: Planter) -> Planted:
    return _amplified(planter, (len(planter.model.blocks) // 2,))


def _calibrated(planter: Planter, with_factor: Callable[[float], Batch], place: Place, kappa: float) -> Batch:
    """The batch whose token has norm kappa: halving over powers of two, until it is 1% close."""
    low, high, wanted = 0.0, 24.0, kappa * planter.healthy_norm
    while True:
        middle = (low + high) / 2
        batch = with_factor(2.0**middle)
        norm = Oracle(planter.model, batch).norm(place)
        if abs(norm - wanted) < 0.01 * wanted or high - low < 1e-6:
            return batch
        low, high = (middle, high) if norm < wanted else (low, middle)


SCENARIOS: dict[str, Callable[[Planter], Planted]] = {
    "single_10": _loud(10.0),
    "single_4": _loud(4.0),
    "three": _loud(*_THREE),
    "eight": _loud(*_EIGHT),
    "cancel": _pair(10.0, 5.0),
    "cancel_plus_one": _pair(10.0, 9.99, 4.0),
    "cluster_16": _cluster,
    "sequence": _sequence,
    "rare": _rare,
    "jacobian": _jacobian,
    "layer_local": _layer_local,
}


def count_scenario(count: int, kappa: float) -> Callable[[Planter], Planted]:
    """``count`` culprits of one size."""
    return _loud(*[kappa] * count)
