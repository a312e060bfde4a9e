# SPDX-License-Identifier: Apache-2.0
"""Spikes with known culprits: a healthy batch, and what was planted in it.

Sizes are in kappa: the norm of a culprit's gradient over the median norm of a healthy step.
Planting may look at exact gradients; nothing that searches sees anything of this but the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.toy_model import NUM_PROMPT, Amplified, Batch, Decoder, Loss, Oracle, Place, Sharpened

_THREE = (10.0, 6.0, 4.0)
_EIGHT = (10.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 4.0)


@dataclass
class Planted:
    """A spiked batch and who did it."""

    batch: Batch
    places: list[Place] = field(default_factory=list)
    """(row, position) of every culprit token."""
    healthy: Batch | None = None
    """Where the whole batch is scaled: what it was before, on which the threshold depends."""


class Planter:
    """Plants culprits of a wanted size into one healthy batch.

    Args:
        model: unsharded, float32.
        batch: healthy.
        healthy_norm: the median norm of healthy steps.
        seed: of the places.
        least: kappa of those scenarios whose culprit is to be just loud enough.
        loss: of the step.
    """

    def __init__(
        self,
        model: Decoder,
        batch: Batch,
        healthy_norm: float,
        seed: int,
        least: float = 4.0,
        loss: Loss = Loss(),  # noqa: B008 (frozen)
    ):
        self.model = model
        self.batch = batch
        self.healthy_norm = healthy_norm
        self.least = least
        self.loss = loss
        self._generator = torch.Generator().manual_seed(1000 + seed)

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.batch.labels.shape)

    def oracle(self, batch: Batch) -> Oracle:
        return Oracle(self.model, batch, self.loss)

    def draw(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self._generator))

    def rows(self, count: int) -> list[int]:
        """Different rows while there are enough."""
        order = torch.randperm(self.shape[0], generator=self._generator).tolist()
        return [order[number % len(order)] for number in range(count)]

    def place(self, row: int) -> Place:
        return row, self.draw(self.shape[1])

    def sign(self) -> int:
        return 1 if self.draw(2) else -1

    def lengths(self) -> torch.Tensor:
        """For each row, (R, 1): a third of its length to all of it."""
        rows, length = self.shape
        return torch.randint(length // 3, length + 1, (rows, 1), generator=self._generator)

    def loud(self, batch: Batch, place: Place, kappa: float) -> Batch:
        """Set the token's advantage so that its gradient has norm kappa and its sign."""
        # ratio 1: the clip neither hides the token nor changes its size
        old = batch.old_log_probs.clone()
        old[place] = self.oracle(batch).log_prob(place)
        advantages = batch.advantages.clone()
        advantages[place] = 1.0
        batch = batch.edited(advantages=advantages, old_log_probs=old)
        unit = self.oracle(batch).norm(place)
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
            batch = planter.loud(batch, place, planter.sign() * kappa)
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
    norm = planter.oracle(planter.batch).row_norm(row)
    advantages = planter.batch.advantages.clone()
    advantages[row] *= 10.0 * planter.healthy_norm / norm
    places = [(row, position) for position in range(planter.shape[1])]
    return Planted(planter.batch.edited(advantages=advantages), places)


def _rare(planter: Planter) -> Planted:
    """The response holds the model's least likely token there, with an advantage of kappa 4 or what is the least."""
    place = planter.place(planter.draw(planter.shape[0]))
    labels = planter.batch.labels.clone()
    labels[place] = planter.oracle(planter.batch).logits(place).argmin()
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
    old[place] = planter.oracle(planter.batch).log_prob(place)
    advantages = planter.batch.advantages.clone()
    advantages[place] = 1.0 if advantages[place] >= 0 else -1.0
    batch = planter.batch.edited(advantages=advantages, old_log_probs=old)

    def with_factor(factor: float) -> Batch:
        where = Amplified(layers, row, NUM_PROMPT + last - 1, factor)
        return batch.edited(amplified=where)

    return Planted(_calibrated(planter, with_factor, place, planter.least), [place])


def _calibrated(planter: Planter, with_factor: Callable[[float], Batch], place: Place, kappa: float) -> Batch:
    """The batch whose token has norm kappa: halving over powers of two, until it is 1% close."""
    low, high, wanted = 0.0, 24.0, kappa * planter.healthy_norm
    while True:
        middle = (low + high) / 2
        batch = with_factor(2.0**middle)
        norm = planter.oracle(batch).norm(place)
        if abs(norm - wanted) < 0.01 * wanted or high - low < 1e-6:
            return batch
        low, high = (middle, high) if norm < wanted else (low, middle)


def _sure(least: float, most: float, nearest: float) -> Callable[[Planter], Planted]:
    """One culprit of kappa 10 whose probability is within two bounds, and nearest to a third number.

    Its label is the model's most likely token there. Where no such token of the batch is within the bounds, the model
    is made surer: at the likeliest one that is less likely, all logits are multiplied, 2% at a time (`Sharpened`).
    """

    def plant(planter: Planter) -> Planted:
        batch = planter.batch
        largest, tokens = _likeliest(planter.oracle(batch))
        within = (largest >= least) & (largest <= most)
        if within.any():
            distance = torch.where(within, (largest - nearest).abs(), torch.inf)
        else:
            distance = torch.where(largest < least, -largest, torch.inf)
        place = divmod(int(distance.argmin()), planter.shape[1])
        labels = batch.labels.clone()
        labels[place] = tokens[place]
        batch = batch.edited(labels=labels)
        factor = 1.0
        while planter.oracle(batch).log_prob(place).exp() < least:
            factor *= 1.02
            batch = batch.edited(amplified=Sharpened(*place, factor))
        return Planted(planter.loud(batch, place, planter.sign() * 10.0), [place])

    return plant


def _likeliest(oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest probability at each place, (R, T), and whose it is; 0 outside of the mask."""
    by_row = [oracle.row_logits(row).softmax(-1).max(-1) for row in range(len(oracle.batch.labels))]
    largest = torch.stack([row.values for row in by_row])
    return torch.where(oracle.batch.mask, largest, 0.0), torch.stack([row.indices for row in by_row])


def _whole(factor: float) -> Callable[[Planter], Planted]:
    """No token's doing: all advantages are multiplied. Rows are cut to different lengths, as the aggregations see."""

    def plant(planter: Planter) -> Planted:
        mask = torch.arange(planter.shape[1]) < planter.lengths()
        healthy = planter.batch.edited(mask=mask)
        return Planted(healthy.edited(advantages=factor * healthy.advantages), healthy=healthy)

    return plant


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
    "jacobian": lambda planter: _amplified(planter, tuple(range(len(planter.model.blocks)))),
    "layer_local": lambda planter: _amplified(planter, (len(planter.model.blocks) // 2,)),
}


WHOLE = {"batch_4": _whole(4.5), "batch_100": _whole(100.0)}
"""Without a culprit: 4.5 times is over the threshold of four times the healthy norm, barely."""
PLANTS = {"certain": _sure(0.99, 1 - 1e-6, 1.0), "likely": _sure(0.5, 0.95, 0.8), **WHOLE}
"""What the battery does not have."""


def count_scenario(count: int, kappa: float) -> Callable[[Planter], Planted]:
    """``count`` culprits of one size."""
    return _loud(*[kappa] * count)
