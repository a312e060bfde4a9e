# SPDX-License-Identifier: Apache-2.0
"""The numbers of an event's drawings, which ``templates/drawings.html`` draws: shares, norms by layer, small curves."""

import math
import re
from typing import NamedTuple

from ...explain.aftermath import Aftermath
from ...explain.culprits import trusted_share
from ...record import Event

Grid = list[list[float | None]]


class HeatMap(NamedTuple):
    """The share of the spike by micro-batch (rows) and rank (columns); empty when nothing is known."""

    shares: Grid
    """None where not measured."""
    is_whole: bool
    """Whether every cell was measured. Where the strategy measures culprits only, or the shares do not add up, the
    culprits' own are drawn and the rest is blank."""

    @property
    def scale(self) -> float:
        """Return the share that has the full shade."""
        return max([1e-12, *(abs(finite(share)) for row in self.shares for share in row)])


def heat_map(event: Event) -> HeatMap:
    """Return an event's shares by micro-batch and rank."""
    if event.shares is not None and event.shares.is_trusted and event.shares.micro_batches:
        return HeatMap([list(row) for row in event.shares.micro_batches], True)
    places = [(c.micro_batch, c.rank, trusted_share(event, c)) for c in event.culprits]
    places = [place for place in places if None not in place and min(place[:2]) >= 0]
    if not places:
        return HeatMap([], False)
    num_micro = max(event.step.num_micro_batches or 0, *(m + 1 for m, _, _ in places))
    num_ranks = max(event.step.world_size or 0, *(r + 1 for _, r, _ in places))
    grid: Grid = [[None] * num_ranks for _ in range(num_micro)]
    for micro_batch, rank, share in places:
        grid[micro_batch][rank] = (grid[micro_batch][rank] or 0.0) + share
    return HeatMap(grid, False)


def layer_norms(event: Event) -> list[tuple[str, float, float]]:
    """Return each layer's name and norm, and the largest culprit's norm in it (0: not known); empty without norms."""
    norms = {layer: finite(event.layers[layer]) for layer in sorted(event.layers, key=natural)}
    if not any(norms.values()):
        return []
    largest = max(event.culprits, key=lambda culprit: finite(culprit.grad_norm), default=None)
    own_norms = largest.layers if largest else {}
    return [(layer, norm, finite(own_norms.get(layer))) for layer, norm in norms.items()]


def spark(part: Aftermath, step: int) -> tuple[list[tuple[float, float]], float, tuple[float, float] | None]:
    """Place a metric around an event in 130 x 32 pixels: its points, the event's step, and the value at that step."""
    wide, high, room = 130.0, 32.0, 4.0
    steps, values = zip(*part.points, strict=True)
    is_log = part.title == "norm" and min(values) > 0
    heights = [math.log(value) if is_log else value for value in values]
    low, size = min(heights), (max(heights) - min(heights)) or 1.0
    length = (steps[-1] - steps[0]) or 1
    *xs, at = [room + (each - steps[0]) / length * (wide - 2 * room) for each in (*steps, step)]
    ys = [high - room - (y - low) / size * (high - 2 * room) for y in heights]
    points = [*zip(xs, ys, strict=True)]
    return points, at, points[steps.index(step)] if step in steps else None


def natural(layer: str) -> tuple:
    """Return a key that sorts layers in the model's order: embedding, layer 0, 1, ..., 10, final norm, head."""
    order = {"embedding": 0, "layer": 1, "norm": 2, "head": 3}
    digits = re.search(r"\d+", layer)
    return order.get(layer.split(" ")[0], 4), int(digits[0]) if digits else 0, layer


def finite(value: float | None) -> float:
    """Return the value; 0 where it is not known or not finite."""
    return value if value is not None and math.isfinite(value) else 0.0
