# SPDX-License-Identifier: Apache-2.0
"""What training and a search take of a card of 80 GB and of its node: a table from the search's own forecast.

    python -m lab.benchmarks.gpu --forecast

Float32 masters, gradients and Adam, dealt out by FSDP2 over all GPUs; gradient checkpointing, bfloat16.
"""

import itertools
from collections.abc import Iterator, Sequence

from gradloc.core.forecast import MODELS, PLANS, Forecast, Layout, Load, Model, forecast
from lab.output import table

CARD = 79.6 * 2**30
"""What an H100 of 80 GB has, in bytes."""
GPUS = (1, 8, 64, 512)
HEAD = ["model", "GPUs", "training", "all on the device", "Adam's state on the host", "copies, too"]
HEAD += ["of a node's memory", "seconds to pin and move it"]


def forecast_of(model: Model, gpus: int, tokens: int) -> Forecast:
    """Of one of so many cards; ``tokens`` of a micro-batch on each."""
    return forecast(model, Layout(gpus, shards=gpus), Load(tokens))


def markdown(tokens: Sequence[int]) -> str:
    """A table for each size of a micro-batch, in GiB of a card, where training fits."""
    return "\n\n".join(f"Micro-batches of {each:,} tokens:\n\n{table([HEAD, *_rows(each)])}" for each in tokens)


def _rows(tokens: int) -> Iterator[list[str]]:
    """The last two columns are of the second and third way."""
    moving = PLANS[1:3]
    for model, gpus in itertools.product(MODELS.values(), GPUS):
        need = forecast_of(model, gpus, tokens)
        if need.trained <= CARD:
            host = ", ".join(_gib(need.node(plan)) for plan in moving)
            seconds = ", ".join(f"{need.seconds(plan):.1f}" for plan in moving)
            on_device = [_gib(need.device(plan)) for plan in PLANS if plan.is_full]
            yield [model.name, str(gpus), _gib(need.trained), *on_device, host, seconds]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
