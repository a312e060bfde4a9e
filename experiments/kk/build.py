# SPDX-License-Identifier: Apache-2.0
"""The model, tokenizer and data of `kk-demo`.

python -m experiments.kk.build --cache .gradloc
"""

import sys

from experiments.cpu import material
from experiments.kk.language import language

RECIPE = material.Recipe(
    # Enough for the format and for part of the puzzles: the rest is left to RL.
    warmup_steps=100,
    warmup_batch=64,
    label_smoothing=0.01,
    num_train=320,
    num_val=80,
)

if __name__ == "__main__":
    sys.exit(material.main(language(), RECIPE))
