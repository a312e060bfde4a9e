# SPDX-License-Identifier: Apache-2.0
"""The demo's language: additions asked and answered in one short sentence.

    What is 12+7?  ->  12+7=19, so the answer is 19.

Text only: no torch and no verl, so that tests of it are quick.
"""

import random
import re
from dataclasses import dataclass

DATA_SOURCE = "gradloc/arithmetic"
LARGEST = 49
"""Both addends are in 0..LARGEST, so that a model of 100 thousand parameters learns them."""
ANSWER = re.compile(r"answer is (\d+)")
EQUATION = re.compile(r"(\d+)\+(\d+)=(\d+)")


@dataclass(frozen=True)
class Addition:
    """A question for the sum of two numbers, its answer, and the sentence that gives it."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left}+{self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def sentence(self) -> str:
        return f"{self.left}+{self.right}={self.answer}, so the answer is {self.answer}."


def draw(num: int, seed: str) -> list[Addition]:
    """Draw `num` different additions, the same for the same seed on every machine.

    Raises:
        ValueError: if `num` is larger than the number of additions.
    """
    pairs = [Addition(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return random.Random(seed).sample(pairs, num)


def to_row(index: int, addition: Addition, split: str) -> dict:
    """Return a row of verl's parquet format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": addition.question}],
        "reward_model": {"style": "rule", "ground_truth": addition.answer},
        "extra_info": {"index": index, "split": split},
    }


def score(data_source, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """Return 1 for the right answer, 0.2 for a true equation with a wrong answer, else 0.

    >>> score(None, "12+7=19, so the answer is 19.", "19")
    1.0
    """
    answer = ANSWER.search(solution_str)
    if answer and answer[1] == ground_truth:
        return 1.0
    equation = EQUATION.search(solution_str)
    if equation and int(equation[1]) + int(equation[2]) == int(equation[3]):
        return 0.2
    return 0.0
