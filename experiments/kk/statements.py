# SPDX-License-Identifier: Apache-2.0
"""What a person on the island says, in the notation of the Knights-and-Knaves data set.

A statement is a tuple: `("telling-truth", i)` and `("lying", i)` are about person i, counted from
0; `("not", s)`, `("and", s, ...)`, `("or", s, ...)`, `("->", s, s)` and `("<=>", s, s)` are made
of others. Source of the notation: Xie et al., arXiv 2410.23123.
"""

import ast

from experiments.errors import ExperimentError

LEAVES = ("telling-truth", "lying")
BINARY = ("->", "<=>")
MANY = ("and", "or")


def parse(text: str) -> tuple:
    """The statements of a puzzle, one for each person, from a Python literal.

    >>> parse("(('lying', 1), ('telling-truth', 0))")
    (('lying', 1), ('telling-truth', 0))

    Raises:
        ExperimentError: if it is none, or speaks of a person that is not there.
    """
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ExperimentError(f"{text!r:.60} is not a tuple of statements.") from None
    if not isinstance(found, tuple) or not found:
        raise ExperimentError(f"{text!r:.60} is not a tuple of statements.")
    for statement in found:
        check(statement, len(found))
    return found


def check(statement, num_people: int) -> None:
    """Refuses what is not a statement about people 0 to `num_people` - 1.

    Raises:
        ExperimentError: naming the part that is wrong.
    """
    kind, *parts = statement if isinstance(statement, tuple) and statement else (None,)
    if kind in LEAVES:
        person = parts[0] if len(parts) == 1 else None
        # A bool is an int to Python.
        if type(person) is not int or not 0 <= person < num_people:
            raise ExperimentError(f"{statement!r:.60} names no person from 0 to {num_people - 1}, as it should.")
        return
    right = {"not": len(parts) == 1}
    right |= dict.fromkeys(BINARY, len(parts) == 2) | dict.fromkeys(MANY, len(parts) >= 2)
    if not isinstance(kind, str) or not right.get(kind):
        raise ExperimentError(f"{statement!r:.60} is not a statement: see experiments/kk/statements.py.")
    for part in parts:
        check(part, num_people)


def english(statement: tuple, names: list[str]) -> str:
    """The statement as a clause.

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


def formula(statement: tuple):
    """The statement as a pysat formula over atoms 1 ... n; atom i + 1: person i is a knight."""
    from pysat.formula import And, Atom, Equals, Implies, Neg, Or

    kind, *parts = statement
    if kind in LEAVES:
        atom = Atom(parts[0] + 1)
        return atom if kind == "telling-truth" else Neg(atom)
    made = {"not": Neg, "and": And, "or": Or, "->": Implies, "<=>": Equals}[kind]
    return made(*(formula(part) for part in parts))
