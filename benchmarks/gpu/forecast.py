# SPDX-License-Identifier: Apache-2.0
"""What training has to leave of a card of 80 GB for a spike to be searched: a table from the search's own forecast.

    python -m benchmarks.gpu.forecast

Float32 masters, gradients and Adam, dealt out evenly by FSDP2, as verl trains by default.
"""

from dataclasses import dataclass

from benchmarks.run import table
from gradloc.core.memory import _USABLE, WAYS, Need, Way

CARD = 79.6 * 2**30
"""What an H100 of 80 GB has, in bytes."""
MOST = 0.12
"""Of a card: so much has to be enough, wherever training itself fits."""
_WORKING = 0.15  # of a card: what a micro-batch takes of it
_CARDS = (8, 16, 32, 64)
HEAD = ["model", "cards", "weights, gradient, Adam", "all on the device", "Adam's state on the host", "copies, too"]
HEAD += ["bisection"]


@dataclass(frozen=True)
class Model:
    """The sizes that count."""

    name: str
    weights: float
    vocabulary: int
    width: int


MODELS = (
    Model("1.5B", 1.54e9, 151_936, 1536),
    Model("7B", 7.62e9, 152_064, 3584),
    Model("32B", 32.8e9, 152_064, 5120),
    Model("72B", 72.7e9, 152_064, 8192),
)


def need_of(model: Model, cards: int) -> Need:
    """On one of so many cards."""
    shards, working = int(4 * model.weights / cards), int(_WORKING * CARD)
    largest = model.vocabulary * model.width // cards  # the embedding, or the head
    return Need(shards=shards, largest=largest, state=2 * shards, micro_batch=working, forward=working // 2)


def left(need: Need, way: Way) -> float:
    """What training's peak has to leave of the card for this way, from 0 to 1: a micro-batch's own place is there."""
    return max(need.of(way) / _USABLE - need.working, 0) / CARD


def of_training(need: Need) -> float:
    """What weights, gradient and Adam's state take of the card."""
    return 4 * need.shards / CARD


def markdown() -> str:
    """The table."""
    rows = [HEAD]
    for model in MODELS:
        for cards in _CARDS:
            need = need_of(model, cards)
            row = [model.name, str(cards), f"{of_training(need):.0%}"]
            if of_training(need) + _WORKING > 1:
                rows.append([*row, "training does not fit", "", "", ""])
            else:
                rows.append([*row, *(f"{left(need, way):.1%}" for way in WAYS)])
    return table(rows)


if __name__ == "__main__":
    print(markdown())
