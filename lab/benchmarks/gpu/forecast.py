# SPDX-License-Identifier: Apache-2.0
"""Print the memory of training and of a search on cards of 80 GB, from the search's forecast.

    python -m lab.benchmarks.gpu --forecast

Float32 master weights, gradients and Adam, sharded by FSDP2 over all GPUs; gradient checkpointing, bfloat16.
"""

import itertools
from collections.abc import Iterator, Sequence

from gradloc.core.memory_plans import PLANS
from gradloc.forecast import MODELS, Forecast, Layout, Load, Model, forecast
from lab.output import table

CARD = 79.6 * 2**30
"""Memory of an H100 of 80 GB, in bytes."""
GPUS = (1, 8, 64, 512)
HEAD = ["model", "GPUs", "training", "all on the device", "Adam's state on the host", "copies, too"]
HEAD += ["of a node's memory", "seconds to pin and move it"]


def forecast_of(model: Model, gpus: int, tokens: int) -> Forecast:
    """Return the forecast for each of ``gpus`` cards, with ``tokens`` in a micro-batch."""
    return forecast(model, Layout(gpus, shards=gpus), Load(tokens))


def markdown(tokens: Sequence[int]) -> str:
    """Return a table for each size of a micro-batch, in GiB per card, where training fits."""
    return "\n\n".join(f"Micro-batches of {each:,} tokens:\n\n{table([HEAD, *_rows(each)])}" for each in tokens)


def _rows(tokens: int) -> Iterator[list[str]]:
    """Yield the rows; the last two columns are for the second and third plan."""
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
