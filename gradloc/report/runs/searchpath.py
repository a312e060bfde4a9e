# SPDX-License-Identifier: Apache-2.0
"""The search's path, a flat list of measured parts, as the tree that it walked."""

from dataclasses import dataclass, field

from ...record import PathEntry, Search
from ...words.numbers import number
from ...words.text import plural

LIMIT = 160
"""Parts drawn per event; a search with a larger budget says how many are left out."""
STAGES = {
    "share": "shares of all tokens",
    "coefficients": "loss coefficients",
    "verify": "candidate, measured alone",
    "residual": "what is left without the culprits",
    "sketch": "norms by random directions",
    "bisect": "bisection",
}
"""Phases that are about no part of the batch: what each measures."""


@dataclass
class Node:
    """One measured part and the parts it was cut into."""

    probe: PathEntry
    children: list["Node"] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the part's norm is over its own threshold; a non-finite norm is."""
        norm, threshold = self.probe.norm, self.probe.threshold
        if norm is None or threshold is None:
            return False
        return not norm <= threshold

    @property
    def label(self) -> str:
        """What the part is, in words."""
        probe = self.probe
        if probe.phase in STAGES:
            return STAGES[probe.phase]
        where = f"micro-batch {probe.micro_batch}" if probe.micro_batch is not None else probe.phase
        if probe.phase == "micro_batch":
            return where
        if probe.phase == "rank" and probe.ranks:
            return _interval("rank", probe.ranks)
        if probe.tokens:
            return _interval("token", probe.tokens)
        return probe.phase or where


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
        parent = min(
            (other for other in nodes if _holds(other.probe, probe)), key=lambda other: _size(other.probe), default=None
        )
        (parent.children if parent else roots).append(node)
        nodes.append(node)
    return roots, max(len(search.path) - LIMIT, 0)


def _holds(outer: PathEntry, inner: PathEntry) -> bool:
    if outer.phase in STAGES or inner.phase in STAGES:
        return False
    if outer.micro_batch != inner.micro_batch or _size(outer) <= _size(inner):
        return False
    if outer.ranks and inner.ranks and not _within(inner.ranks, outer.ranks):
        return False
    if outer.tokens is None:
        return True
    return inner.tokens is not None and _within(inner.tokens, outer.tokens)


def _within(inner: list[int], outer: list[int]) -> bool:
    return outer[0] <= inner[0] and inner[-1] <= outer[-1]


def _size(probe: PathEntry) -> tuple[int, int]:
    ranks = probe.ranks[-1] - probe.ranks[0] if probe.ranks else 1 << 30
    tokens = probe.tokens[-1] - probe.tokens[0] if probe.tokens else 1 << 30
    return ranks, tokens


def cost(search: Search) -> str:
    """What the search took, in words."""
    passes = (search.backwards, "backward pass"), (search.forwards, "forward pass")
    parts = [plural(count, kind) for count, kind in passes if count is not None]
    return ", ".join(parts + ([] if search.seconds is None else [f"{number(search.seconds, 3)} s"]))
