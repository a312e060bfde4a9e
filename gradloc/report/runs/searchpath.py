# SPDX-License-Identifier: Apache-2.0
"""The search's path, a flat list of measured parts, as the tree that it walked."""

from dataclasses import dataclass, field

from ...record import PathEntry, Search
from ...words.numbers import number
from ...words.text import plural

LIMIT = 160
"""Parts drawn per event; the rest are counted."""
STAGES = {
    "share": "shares of all tokens",
    "coefficients": "loss coefficients",
    "verify": "candidate, measured alone",
    "residual": "what is left without the culprits",
    "sketch": "norms by random directions",
    "bisect": "bisection",
}
"""What the phases measure that are about no part of the batch."""


@dataclass
class Node:
    """One measured part and the parts it was cut into."""

    probe: PathEntry
    children: list["Node"] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the part's norm is over its own threshold; a non-finite norm is."""
        norm, threshold = self.probe.norm, self.probe.threshold
        return norm is not None and threshold is not None and not norm <= threshold

    @property
    def label(self) -> str:
        probe = self.probe
        if probe.phase in STAGES:
            return STAGES[probe.phase]
        if probe.phase == "rank" and probe.ranks:
            return _interval("rank", probe.ranks)
        if probe.tokens and probe.phase != "micro_batch":
            return _interval("token", probe.tokens)
        if probe.phase in ("micro_batch", "") and probe.micro_batch is not None:
            return f"micro-batch {probe.micro_batch}"
        return probe.phase


def _interval(noun: str, bounds: list[int]) -> str:
    first, last = bounds[0], bounds[-1] - 1
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def tree(search: Search) -> tuple[list[Node], int]:
    """The roots of the search's tree in the order measured, and how many parts were left out.

    A part belongs under the smallest part measured before it that holds it.
    """
    roots: list[Node] = []
    nodes: list[Node] = []
    for probe in search.path[:LIMIT]:
        node = Node(probe)
        around = [other for other in nodes if _holds(other.probe, probe)]
        siblings = min(around, key=lambda other: _size(other.probe)).children if around else roots
        siblings.append(node)
        nodes.append(node)
    return roots, max(len(search.path) - LIMIT, 0)


def _holds(outer: PathEntry, inner: PathEntry) -> bool:
    if outer.phase in STAGES or inner.phase in STAGES or outer.micro_batch != inner.micro_batch:
        return False
    if _size(outer) <= _size(inner) or (outer.ranks and inner.ranks and not _is_within(inner.ranks, outer.ranks)):
        return False
    return outer.tokens is None or (inner.tokens is not None and _is_within(inner.tokens, outer.tokens))


def _is_within(inner: list[int], outer: list[int]) -> bool:
    return outer[0] <= inner[0] and inner[-1] <= outer[-1]


def _size(probe: PathEntry) -> tuple[int, ...]:
    """Ranks and tokens of a part, all where they are not named."""
    return tuple(bounds[-1] - bounds[0] if bounds else 1 << 30 for bounds in (probe.ranks, probe.tokens))


def cost(search: Search) -> str:
    passes = (search.backwards, "backward pass"), (search.forwards, "forward pass")
    parts = [plural(count, kind) for count, kind in passes if count is not None]
    return ", ".join(parts + ([] if search.seconds is None else [f"{number(search.seconds, 3)} s"]))
