# SPDX-License-Identifier: Apache-2.0
"""Draw, check and word Knights-and-Knaves puzzles.

Every person is a knight, whose statement is true, or a knave, whose statement is false. All assignments are tried, 128
for seven people; a puzzle has exactly one solution. A statement is a tuple, in the notation of the Knights-and-Knaves
data set (Xie et al., arXiv 2410.23123): `("telling-truth", i)` and `("lying", i)` are about person i, counted from 0;
`("not", s)`, `("and", s, ...)`, `("or", s, ...)`, `("->", s, s)` and `("<=>", s, s)` combine others.
"""

import ast
import itertools
import random
from dataclasses import dataclass
from functools import cached_property

from lab.experiments.errors import ExperimentError

LEAVES = ("telling-truth", "lying")
BINARY = ("->", "<=>")
MANY = ("and", "or")
NAMES = (
    "Abigail Alexander Amelia Aria Aurora Ava Avery Benjamin Charlotte Chloe Daniel David Elizabeth Ella Emily Emma "
    "Ethan Evelyn Grace Harper Henry Isabella Jack Jackson Jacob James Joseph Joshua Lily Liam Logan Lucas Luke Mason "
    "Matthew Mia Michael Noah Oliver Olivia Owen Penelope Riley Samuel Scarlett Sebastian Sofia Sophia Theodore "
    "Victoria William Zoey"
).split()
SIMPLE = "simple"
"""Kind of a statement about one person."""
KINDS = (SIMPLE, SIMPLE, "not", *MANY, *BINARY)
"""The kinds to draw from with equal probability; a simple claim is twice as likely."""
MOST = 16
"""Maximum number of people of a puzzle to check; twice that is 65 thousand times the work."""
PATIENCE = 10_000
"""Draws without a new puzzle after which there are assumed to be no more."""


def parse(text: str) -> tuple:
    """Parse the statements of a puzzle, one for each person, from a Python literal.

    >>> parse("(('lying', 1), ('telling-truth', 0))")
    (('lying', 1), ('telling-truth', 0))

    Raises:
        ExperimentError: if it is not one, or refers to a person that does not exist.
    """
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ExperimentError(f"{text!r:.60} is not a tuple of statements.") from None
    if not isinstance(found, tuple) or not found:
        raise ExperimentError(f"{text!r:.60} is not a tuple of statements.")
    if len(found) > MOST:
        raise ExperimentError(f"{text!r:.60} has {len(found)} statements, and at most {MOST} can be checked.")
    for statement in found:
        check(statement, len(found))
    return found


def check(statement, num_people: int) -> None:
    """Refuse anything but a statement about people 0 to `num_people` - 1.

    Raises:
        ExperimentError: naming the part that is wrong.
    """
    kind, *parts = statement if isinstance(statement, tuple) and statement else (None,)
    if kind in LEAVES:
        person = parts[0] if len(parts) == 1 else None
        # isinstance would accept a bool
        if type(person) is not int or not 0 <= person < num_people:
            raise ExperimentError(f"{statement!r:.60} names no person from 0 to {num_people - 1}, as it should.")
        return
    right = {"not": len(parts) == 1}
    right |= dict.fromkeys(BINARY, len(parts) == 2) | dict.fromkeys(MANY, len(parts) >= 2)
    if not isinstance(kind, str) or not right.get(kind):
        raise ExperimentError(f"{statement!r:.60} is not a statement: see lab/experiments/kk/puzzle.py.")
    for part in parts:
        check(part, num_people)


def english(statement: tuple, names: list[str]) -> str:
    """Return the statement as an English clause.

    >>> english(("->", ("lying", 1), ("telling-truth", 0)), ["Zoey", "Owen"])
    'if Owen is a knave then Zoey is a knight'
    """
    kind, *parts = statement
    if kind in LEAVES:
        return f"{names[parts[0]]} is a {'knight' if kind == 'telling-truth' else 'knave'}"
    if kind == "not" and parts[0][0] in LEAVES:
        return english(parts[0], names).replace(" is a ", " is not a ")
    said = [english(part, names) for part in parts]
    if kind == "not":
        return f"it is not the case that {said[0]}"
    if kind == "->":
        return f"if {said[0]} then {said[1]}"
    return {"and": " and ", "or": " or ", "<=>": " if and only if "}[kind].join(said)


def holds(statement: tuple, knights: tuple[bool, ...]) -> bool:
    """Return whether a statement is true if these people are knights.

    >>> holds(("->", ("lying", 1), ("telling-truth", 0)), (False, True))
    True
    """
    kind, *parts = statement
    if kind in LEAVES:
        return knights[parts[0]] == (kind == "telling-truth")
    truths = [holds(part, knights) for part in parts]
    if kind == "->":
        return not truths[0] or truths[1]
    return {"not": not truths[0], "and": all(truths), "or": any(truths), "<=>": truths[0] == truths[-1]}[kind]


@dataclass(frozen=True)
class Puzzle:
    """A puzzle with any number of solutions."""

    names: tuple[str, ...]
    said: tuple[tuple, ...]
    """One statement for each name, in the notation above."""

    @cached_property
    def solution(self) -> tuple[bool, ...]:
        """Which people are knights.

        Raises:
            ExperimentError: if there is not exactly one solution.
        """
        found = solutions(self.said)
        if len(found) != 1:
            many = "more than one" if found else "no"
            raise ExperimentError(f"the puzzle of {', '.join(self.names)} has {many} solution, and needs exactly one.")
        return found[0]


def solutions(said: tuple[tuple, ...]) -> list[tuple[bool, ...]]:
    """Return all assignments that are consistent with the statements; True is a knight.

    >>> solutions((("lying", 1), ("and", ("telling-truth", 0), ("telling-truth", 1))))
    [(True, False)]
    """
    ways = itertools.product((True, False), repeat=len(said))
    return [way for way in ways if all(holds(s, way) == is_knight for s, is_knight in zip(said, way, strict=True))]


def draw_statement(rng: random.Random, num_people: int, speaker: int, kinds) -> tuple:
    """Draw a person's statement: about another one or, if it has two parts, about anyone."""
    kind = rng.choice(kinds)
    if kind in (SIMPLE, "not"):
        about = rng.choice([i for i in range(num_people) if i != speaker])
        claim = (rng.choice(LEAVES), about)
        return claim if kind == SIMPLE else (kind, claim)
    pair = rng.sample(range(num_people), 2)
    return (kind, *((rng.choice(LEAVES), person) for person in pair))


def draw(num: int, num_people: int, rng: random.Random, names=NAMES, kinds=KINDS) -> list[Puzzle]:
    """Draw different puzzles with exactly one solution each.

    Args:
        num: number of puzzles.
        num_people: 2 to 7; the paper trains on 3 to 7.
        rng: the same state gives the same puzzles on every machine.
        names: names to draw from.
        kinds: kinds of statement to draw from, some of `KINDS`.

    Raises:
        ExperimentError: if there are not enough puzzles.
    """
    found, since = {}, 0
    while len(found) < num:
        puzzle = Puzzle(
            tuple(rng.sample(list(names), num_people)),
            tuple(draw_statement(rng, num_people, i, kinds) for i in range(num_people)),
        )
        since += 1
        if puzzle not in found and len(solutions(puzzle.said)) == 1:
            found[puzzle] = since = 0
        if since > PATIENCE:
            raise ExperimentError(
                f"only {len(found)} different puzzles of {num_people} people were found and {num} "
                "are needed: ask for fewer, or for more people."
            )
    return list(found)
