# SPDX-License-Identifier: Apache-2.0
"""Slow obvious versions, and the reward."""

import importlib
import itertools

import pytest


def holds(statement: tuple, knights: tuple[bool, ...]) -> bool:
    """Whether a statement is true where these people are knights."""
    kind, *parts = statement
    if kind == "telling-truth":
        return knights[parts[0]]
    if kind == "lying":
        return not knights[parts[0]]
    truths = [holds(part, knights) for part in parts]
    return {
        "not": lambda: not truths[0],
        "and": lambda: all(truths),
        "or": lambda: any(truths),
        "->": lambda: not truths[0] or truths[1],
        "<=>": lambda: truths[0] == truths[1],
    }[kind]()


def every_solution(said: tuple[tuple, ...]) -> list[tuple[bool, ...]]:
    """All ways to be knights and knaves, one by one, that fit what is said."""
    ways = itertools.product((False, True), repeat=len(said))
    return [way for way in ways if all(holds(s, way) == way[i] for i, s in enumerate(said))]


@pytest.fixture(scope="session")
def kk():
    """The reward's module."""
    return importlib.import_module("gradloc.rewards.kk")
