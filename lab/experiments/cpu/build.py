# SPDX-License-Identifier: Apache-2.0
"""Build the demo's model, tokenizer and data: a model that adds.

python -m lab.experiments.cpu.build --cache .gradloc
"""

import sys
from functools import partial

from lab.experiments.cpu import arithmetic, material
from lab.experiments.cpu.material import Recipe


def split(num_train: int, num_val: int, seed: int):
    """Return additions to train on and to validate with."""
    additions = arithmetic.draw(num_train + num_val, f"data {seed}")
    return additions[:num_train], additions[num_train:]


LANGUAGE = material.Language(
    name="demo",
    vocabulary=(*"0123456789+=,.?", "What", " is", " so", " the", " answer", " "),
    # a word with the space before it, a digit, or another character
    pieces=r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]",
    split=split,
    lessons=arithmetic.draw,
    to_row=arithmetic.to_row,
    sources=(__file__, arithmetic.__file__),
)

make_tokenizer = partial(material.make_tokenizer, LANGUAGE)


if __name__ == "__main__":
    sys.exit(material.main(LANGUAGE.name, partial(material.build, LANGUAGE, Recipe())))
