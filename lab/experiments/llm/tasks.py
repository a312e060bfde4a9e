# SPDX-License-Identifier: Apache-2.0
"""Draw questions: sums, dates and small word problems, each after one solved example.

The example shows the form of an answer; without it the model writes an essay. Text only: no torch and no verl.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

DATA_SOURCE = "gradloc/small-sums"
SYSTEM = "Be brief."


@dataclass(frozen=True)
class Question:
    """A question with its right answer."""

    text: str
    answer: str
    """An integer in digits."""
    example: tuple[str, str]
    """Another question of its kind, and its answer."""


def sum_of_two(source: random.Random) -> Question:
    left, right = source.randint(2, 30), source.randint(2, 12)
    return Question(f"What is {left} + {right}?", str(left + right), ("What is 4 + 3?", "4 + 3 = 7"))


def year_after(source: random.Random) -> Question:
    year, later = source.randint(1800, 2019), source.randint(1, 9)
    example = ("What year is 3 years after 1952?", "1952 + 3 = 1955")
    return Question(f"What year is {later} years after {year}?", str(year + later), example)


def days_of_weeks(source: random.Random) -> Question:
    weeks = source.randint(4, 12)
    example = ("How many days are in 3 weeks?", "3 * 7 = 21")
    return Question(f"How many days are in {weeks} weeks?", str(7 * weeks), example)


def pens_in_boxes(source: random.Random) -> Question:
    boxes, pens = source.randint(2, 9), source.randint(2, 10)
    example = ("How many pens are in 2 boxes of 3?", "2 * 3 = 6")
    return Question(f"How many pens are in {boxes} boxes of {pens}?", str(boxes * pens), example)


KINDS: tuple[Callable[[random.Random], Question], ...] = (
    sum_of_two,
    year_after,
    sum_of_two,
    days_of_weeks,
    sum_of_two,
    pens_in_boxes,
)
"""The kinds in turn: half of all questions are sums."""


def draw(num: int, seed: str) -> list[Question]:
    """Draw `num` questions, the kinds in turn, the same for the same seed on every machine."""
    source = random.Random(seed)
    return [KINDS[i % len(KINDS)](source) for i in range(num)]


def to_row(index: int, question: Question, split: str) -> dict:
    """Return a row of verl's parquet format."""
    asked, answered = question.example
    turns = [("system", SYSTEM), ("user", asked), ("assistant", answered), ("user", question.text)]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": role, "content": content} for role, content in turns],
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"index": index, "split": split},
    }
