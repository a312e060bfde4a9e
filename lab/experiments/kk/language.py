# SPDX-License-Identifier: Apache-2.0
"""Build the model, tokenizer and data of `kk-demo`: two people, few names, short answers in the published format.

    Ava said Zoey is a knave. Zoey said Ava is a knight and Zoey is a knight.
    <think>Ava: true. Zoey: false.</think><answer>(1) Ava is a knight
    (2) Zoey is a knave</answer>

The frame around the puzzle and the system prompt are omitted, since a model of 100 thousand parameters cannot learn
their words; the answer is scored by the same reward.

python -m lab.experiments.kk.language --cache .gradloc
"""

import random
import re
import sys
from dataclasses import dataclass
from functools import lru_cache, partial

from lab.experiments.cpu import material
from lab.experiments.kk import puzzle, wording

NAMES = ("Ava", "Jack", "Mia", "Zoey")
NUM_PEOPLE = 2
KINDS = (puzzle.SIMPLE, "and", "or")
NUM_PUZZLES = 400
"""Number of puzzles for training, validation and the warm-up together."""
PIECES = r"</?[a-z]+>| ?[A-Za-z]+|\s|[^\sA-Za-z]"
"""A tag, a word with the space before it, or one other character."""
# The warm-up teaches the format and some puzzles; RL the rest.
RECIPE = material.Recipe(warmup_steps=100, warmup_batch=64, label_smoothing=0.01, num_train=320, num_val=80)


@dataclass(frozen=True)
class Exercise:
    """A puzzle as a question and the response that solves it."""

    puzzle: puzzle.Puzzle

    @property
    def question(self) -> str:
        names = list(self.puzzle.names)
        pairs = zip(names, self.puzzle.said, strict=True)
        return " ".join(f"{name} said {puzzle.english(said, names)}." for name, said in pairs)

    @property
    def sentence(self) -> str:
        pairs = zip(self.puzzle.names, self.puzzle.solution, strict=True)
        thoughts = " ".join(f"{name}: {'true' if knight else 'false'}." for name, knight in pairs)
        return wording.response(thoughts, wording.answer(self.puzzle))


@lru_cache
def pool() -> tuple[Exercise, ...]:
    """Return all exercises in a random order."""
    rng = random.Random("knights of the demo")
    return tuple(map(Exercise, puzzle.draw(NUM_PUZZLES, NUM_PEOPLE, rng, NAMES, KINDS)))


def split(num_train: int, num_val: int, _seed: int) -> tuple[list[Exercise], list[Exercise]]:
    """Return exercises to train on, from the front, and to validate with, from the back."""
    return list(pool()[:num_train]), list(pool()[-num_val:])


def lessons(num: int, seed: str) -> list[Exercise]:
    """Draw exercises from the first half, which validation does not use."""
    return random.Random(seed).choices(pool()[: NUM_PUZZLES // 2], k=num)


def to_row(index: int, exercise: Exercise, part: str) -> dict:
    """Return a row of verl's parquet format."""
    messages = [{"role": "user", "content": exercise.question}]
    return wording.to_row(index, exercise.puzzle, part, messages)


def language() -> material.Language:
    """Return the language of `kk-demo`."""
    texts = (text for exercise in pool() for text in (exercise.question, exercise.sentence))
    return material.Language(
        name="kk-demo",
        vocabulary=tuple(sorted({piece for text in texts for piece in re.findall(PIECES, text)})),
        pieces=PIECES,
        split=split,
        lessons=lessons,
        to_row=to_row,
        sources=(__file__, puzzle.__file__, wording.__file__),
    )


if __name__ == "__main__":
    sys.exit(material.main("kk-demo", partial(material.build, language(), RECIPE)))
