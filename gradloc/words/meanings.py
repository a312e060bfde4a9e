# SPDX-License-Identifier: Apache-2.0
"""The table of causes, ``causes.ini``: what each means, and what follows from it. Pure, standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass

from .advice import ACTIONS, actions_of, read_table


@dataclass(frozen=True)
class Meaning:
    """A section of the table: a cause, or a special case of some. The table's head says what its keys are."""

    label: str
    title: str = ""
    means: str = ""
    factor: str = ""
    odd: str = ""
    headline: str = ""
    figure: tuple[str, ...] = ("", "", "", "")
    named: str = ""
    do: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    say: str = ""
    why: str = ""
    check: str = "No further event has this cause."
    causes: tuple[str, ...] = ()
    when: tuple[str, ...] = ()

    @property
    def seen(self) -> str:
        """What is seen, as the docs say it."""
        return self.title or self.label

    def advice(self, trainer: str | None, strategy: str = "", is_distilled: bool = False) -> list[tuple[str, str]]:
        """Pairs of what to do and its config line, for a run of this trainer and a search by this strategy;
        ``is_distilled``: without what is about rewards."""
        more = "more_probes" if strategy == "bisect" else "more_steps"  # bisection alone counts probes
        names = [name for name in self.do if not is_distilled or not ACTIONS[name].is_of_rewards]
        return actions_of([more if name == "more_steps" else name for name in names], trainer)


def _meaning(label: str, row: Mapping[str, str]) -> Meaning:
    found: dict[str, str | tuple[str, ...]] = {**({"causes": (label,)} if "title" in row else {}), **row}
    for key in {"do", "cures", "causes", "when"} & {*row}:
        found[key] = tuple(row[key].split())
    if "figure" in row:
        found["figure"] = tuple(cell.strip() for cell in f"{row['figure']}|||".split("|")[:4])
    return Meaning(label, **found)  # type: ignore[arg-type]


_TABLE = [_meaning(label, row) for label, row in read_table("causes.ini").items()]
MEANINGS = {meaning.label: meaning for meaning in _TABLE if meaning.title}
"""Of causes, by their labels."""
RULES = tuple(meaning for meaning in _TABLE if meaning.why)
"""What to do, in the order in which they are asked."""


def meaning_of(label: str) -> Meaning:
    """What a cause means; of an unknown label, what is said when nothing stands out."""
    return MEANINGS.get(label, MEANINGS["unknown"])
