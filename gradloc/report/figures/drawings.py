# SPDX-License-Identifier: Apache-2.0
"""An event's drawings as SVG: shares by rank and micro-batch, norms by layer. No library: they are rectangles.

Colours are classes of the style sheet, so that they follow the page's theme; sizes are in pixels.
"""

import math
import re
from xml.sax.saxutils import escape, quoteattr

from ...explain.aftermath import Aftermath
from ...explain.culprits import trusted_share
from ...explain.numbers import number, percent
from ...record import Event

CELLS_NAMED = 96
"""Most cells that have their numbers written in them."""
ROWS_NAMED = 40
"""Most layers that are all named; of more, every fourth is."""

Grid = list[list[float | None]]


def heat_map(event: Event) -> tuple[str | None, bool]:
    """Draw the share of the spike by rank (columns) and micro-batch (rows).

    Returns:
        The drawing, None when nothing is known; and whether every cell was measured. Where the strategy measures
        culprits only, or the shares do not add up, the culprits' own are drawn and the rest is blank.
    """
    grid, is_whole = share_grid(event)
    if not grid:
        return None, is_whole
    num_ranks = max(map(len, grid))
    wide = min(max(420 // num_ranks, 6), 64)
    high = min(max(420 // len(grid), 5), 25)
    scale = max([1e-12, *(abs(value) for row in grid for value in row if _finite(value))])
    has_numbers = num_ranks * len(grid) <= CELLS_NAMED and wide >= 40
    left, top = 54, 22
    marks = []
    for at, row in enumerate(grid):
        for rank, value in enumerate(row):
            across, down, share = left + rank * wide, top + at * high, _finite(value)
            box = f'x="{across}" y="{down}" width="{wide - 1}" height="{high - 1}"'
            title = f"rank {rank}, micro-batch {at}: {percent(value)}"
            marks.append(f'<rect class="cell" {box}><title>{title}</title></rect>')
            strength = round(math.sqrt(abs(share) / scale), 2)
            if strength > 0.02:
                side = "spike" if share > 0 else "calm"
                marks.append(f'<rect class="{side}" {box} fill-opacity="{strength * 0.85:.2f}" pointer-events="none"/>')
            if has_numbers and abs(share) >= 5e-4:
                x, y = across + wide / 2, down + high / 2 + 4
                marks.append(f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{percent(value)}</text>')
    for at in _ticks(num_ranks, wide, 26):
        marks.append(_axis(left + at * wide + wide / 2, top - 7, at, "middle"))
    for at in _ticks(len(grid), high, 15):
        marks.append(_axis(left - 8, top + at * high + high / 2 + 4, at, "end"))
    marks.append(_axis(0, top - 7, "rank"))
    width, height = max(left + num_ranks * wide, 160), top + len(grid) * high + 4
    return _svg(width, height, "Share of the spike by rank and micro-batch", marks), is_whole


def share_grid(event: Event) -> tuple[Grid, bool]:
    """Return shares by micro-batch and rank, None where not measured or not trusted, and whether all are known."""
    if event.shares is not None and event.shares.is_trusted and event.shares.micro_batches:
        return [list(row) for row in event.shares.micro_batches], True
    places = [(c.micro_batch, c.rank, trusted_share(event, c)) for c in event.culprits]
    places = [place for place in places if None not in place and min(place[:2]) >= 0]
    if not places:
        return [], False
    num_micro = max(event.step.num_micro_batches or 0, *(m + 1 for m, _, _ in places))
    num_ranks = max(event.step.world_size or 0, *(r + 1 for _, r, _ in places))
    grid: Grid = [[None] * num_ranks for _ in range(num_micro)]
    for micro_batch, rank, share in places:
        grid[micro_batch][rank] = (grid[micro_batch][rank] or 0.0) + share
    return grid, False


def layer_bars(event: Event) -> str | None:
    """Draw norms by layer: the whole step as bars, the largest culprit as diamonds; None without norms."""
    layers = sorted(event.layers, key=natural)
    norms = [_finite(event.layers[layer]) for layer in layers]
    if not any(norms):
        return None
    largest = max(event.culprits, key=lambda culprit: _finite(culprit.grad_norm), default=None)
    own_norms = {layer: _finite(norm) for layer, norm in (largest.layers if largest else {}).items()}
    high = 19 if len(layers) <= ROWS_NAMED else 9
    left, width = min(12 + 7 * max(map(len, layers)), 170), 420
    scale = (width - left - 70) / max([*norms, *own_norms.values()])
    marks = []
    for at, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        y, own = 24 + at * high, own_norms.get(layer, 0.0)
        if high > 10 or at % 4 == 0:
            marks.append(_axis(left - 8, y + high / 2 + 3, layer, "end"))
        title = f"{layer}: {number(norm, 3)}" + (f", largest culprit {number(own, 3)}" if own else "")
        marks.append(
            f'<rect class="bar" x="{left}" y="{y}" width="{max(norm * scale, 1):.1f}" height="{high - 4}">'
            f"<title>{escape(title)}</title></rect>"
        )
        if high > 10:
            marks.append(_axis(left + max(norm, own) * scale + 9, y + high / 2 + 3, number(norm, 3)))
        if own:
            x, middle = left + own * scale, y + high / 2 - 2
            marks.append(f'<path class="diamond" d="M{x:.1f} {middle - 5:g}l5 5l-5 5l-5 -5z"/>')
    marks.append(f'<rect class="bar" x="{left}" y="4" width="14" height="9"/>')
    marks.append(_axis(left + 20, 13, "the whole step"))
    if own_norms:
        marks.append(f'<path class="diamond" d="M{left + 127} 4l5 5l-5 5l-5 -5z"/>')
        marks.append(_axis(left + 138, 13, "the largest culprit"))
    return _svg(width, 28 + high * len(layers), "Gradient norm by layer, the whole step and the largest culprit", marks)


def spark(part: Aftermath, step: int) -> str:
    """Draw a metric around an event: a line, a bar at the event's step, and a dot at its own value."""
    wide, high, room = 130.0, 32.0, 4.0
    steps, values = zip(*part.points, strict=True)
    is_log = part.title == "norm" and min(values) > 0
    heights = [math.log(value) if is_log else value for value in values]
    low, size = min(heights), (max(heights) - min(heights)) or 1.0
    length = (steps[-1] - steps[0]) or 1
    xs = [room + (at - steps[0]) / length * (wide - 2 * room) for at in (*steps, step)]
    ys = [high - room - (y - low) / size * (high - 2 * room) for y in heights]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=False))
    marks = [f'<path class="at" d="M{xs[-1]:.1f} 0V{high:g}"/><polyline class="line" points="{line}"/>']
    for at, x, y in zip(steps, xs, ys, strict=False):
        if at == step:
            marks.append(f'<circle class="spike" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>')
    after = "" if part.after is None else f", {number(part.after, 3)} after"
    return _svg(wide, high, f"{part.title}: {number(part.before, 3)} before{after}", marks)


def natural(layer: str) -> tuple:
    """Return a key that sorts layers in the model's order: embedding, layer 0, 1, ..., 10, final norm, head."""
    order = {"embedding": 0, "layer": 1, "norm": 2, "head": 3}
    digits = re.search(r"\d+", layer)
    return order.get(layer.split(" ")[0], 4), int(digits[0]) if digits else 0, layer


def _ticks(count: int, size: int, least: int) -> range:
    """Return the rows or columns to number, so that the numbers do not touch."""
    return range(0, count, max(-(-least // size), 1))


def _axis(x: float, y: float, words: object, anchor: str = "start") -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(words))}</text>'


def _svg(width: float, height: float, title: str, marks: list[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    return f'<svg class="drawing" {size} role="img" aria-label={quoteattr(title)}>{"".join(marks)}</svg>'


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
