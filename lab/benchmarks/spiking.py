# SPDX-License-Identifier: Apache-2.0
"""Measure the price of a spiking step: verl 0.7's real actor on a pretrained model, with the search and without.

    python -m lab.benchmarks.spiking                              # SmolLM2-135M, two ranks of four micro-batches each
    python -m lab.benchmarks.spiking --case eight --dtype bfloat16 --times 3 --tree ~/verl

An update with the search is the trainer's whole step: trigger, search, the driver's part, and the event on disk. An
update without is the same update of the same batch with gradloc's hook removed. The two alternate, in both precisions,
each with its own actor and healthy norm. The learning rate is 0, so every repetition has the same spike. `batch` keeps
the history of scales of the healthy updates; `batch_alone` has none. `published` is the search of `published.py` in
place of ours, without certificate or event, once and in float32. Writes spiking.json after every case.
"""

import copy
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lab.benchmarks import pretrained
from lab.benchmarks.healthy import spent, trees, with_worlds
from lab.benchmarks.published import descend
from lab.benchmarks.run import MACHINE, REPO, Progress, Record, as_typed, digest, finish, parser, write
from lab.output import table
from tests.toy_model import Batch, Oracle, Place
from tests.world import World, harness

SIZES = {"single": (10.0,), "thousandfold": (1000.0,), "eight": (10.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 4.0)}
"""The planted tokens' gradient norms by case, in healthy norms; the other cases scale the whole batch."""
_ANY = {"single": 2.0, "thousandfold": 2.0, "eight": 3.0, "batch": 1.5, "batch_alone": 2.0}
LIMITS = {"float32": _ANY, "bfloat16": {**_ANY, "thousandfold": 2.3}}
"""Precision -> case -> maximum ratio of an update's time with and without the search."""
_FIRST = "float32"  # where `published` is timed
_PER_RANK = 8  # rows: four micro-batches of two
_HEALTHY = 5  # updates for the running norm and the typical scale
_THRESHOLD = 4.0  # times the healthy norm: the trigger's minimum
_SETTINGS = [
    "actor_rollout_ref.actor.spike_detection=True",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.gradloc.search.max_cures=0",  # each would cost a pass
]
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Make ranks keep freed memory, as a GPU's allocator does. A virtual machine's kernel takes up to 20 us for each new
page of 4 KiB, which can make a search's backwards 1.5 times as slow."""
_CLOCKS = ("seconds", "cpu_seconds")
HEAD = ["spike", "computed in", "with / without the search: wall", "processor time", "at most", "seconds without"]
HEAD += ["search (f)", "closure", "recall", "false", "verdict"]
HEAD += ["published / without: wall", "processor time", "published (f)"]
_trainers: dict[str, Any] = {}
"""Precision -> trainer."""


# ---- on every rank


def prepare(model: str, folder: str, dtype: str) -> None:
    """Build verl's actor with a model from a folder and a precision; events go to another folder."""
    inner = pretrained.Pretrained(Path(model)).inner
    size = f"actor_rollout_ref.actor.ppo_mini_batch_size={_PER_RANK * dist.get_world_size()}"
    precision = f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"
    _trainers[dtype] = harness.make_trainer([*_SETTINGS, size, precision], f"{folder}-{dtype}", model=inner)


def watch(dtype: str, threshold: float, num_tokens: int) -> None:
    """Set the threshold for steps with ``num_tokens`` tokens."""
    driver = _trainers[dtype].driver
    driver.trigger = replace(driver.trigger, tau=threshold * num_tokens**0.5)


def update(dtype: str, batch: Batch, way: str, is_alone: bool = False) -> dict[str, Any]:
    """Update once.

    Args:
        dtype: precision of the actor.
        batch: all ranks' rows.
        way: ``with`` the search, ``without``, or with the ``published`` one.
        is_alone: whether the driver has no history of scales.

    Returns:
        ``seconds``, ``cpu_seconds`` and ``norm``; from the search ``search_seconds``, ``cost_f``, ``named`` as (row,
        position), ``verdict``, and if shares were measured ``closure`` and ``closure_error``.
    """
    trainer, data = _trainers[dtype], _as_verls(batch)
    localizer, driver, spikes, kind = trainer.actor.gradloc.localizer, trainer.gradloc, trainer.driver, type(trainer)
    scale = copy.deepcopy(spikes.scale)
    if is_alone:
        spikes.scale = type(scale)()
    loop = sys.modules[type(localizer).__module__]
    search = loop.localize
    result: dict[str, Any] = {}
    if way == "without":
        trainer.actor.gradloc.localizer = trainer.gradloc = None
        trainer.__class__ = harness.Trainer
    if way == "published":
        loop.localize = lambda *arguments, **_: _published(result, *arguments)
        localizer.num_failures = 0
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    out = trainer.update(data)
    result |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    trainer.actor.gradloc.localizer, trainer.gradloc, loop.localize = localizer, driver, search
    trainer.__class__ = kind
    if math.isfinite(spikes.trigger.tau):  # it learns from the healthy updates only
        spikes.scale = scale
    result["norm"] = float(out["metrics"]["actor/grad_norm"][0][0])
    for event in out["events"]:
        result |= {"search_seconds": event["search"]["seconds"], "verdict": event["certificate"]["verdict"]}
        result["cost_f"] = event["search"]["forwards"] + 2 * event["search"]["backwards"]
        result["named"] = [(c["row"], position) for c in event["culprits"] for position in c["positions"]]
        shares = event["shares"] or {}
        result |= {key: shares[key] for key in ("closure", "closure_error") if key in shares}
    return result


class _Done(Exception):
    """Raised after the published search has been timed; the step is not changed."""


def _published(result: dict[str, Any], step, space, ranks, *_: Any) -> None:
    saved = space.take()
    prober = harness.part("core.probe").Prober(step, space, ranks)
    started = time.perf_counter()
    descend(prober)
    result |= {"search_seconds": time.perf_counter() - started, "cost_f": prober.cost}
    space.put(saved)
    raise _Done


def _as_verls(batch: Batch) -> Any:
    import numpy as np

    from verl import DataProto

    ids = torch.cat([batch.tokens, batch.labels[:, -1:]], 1)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        "responses": batch.labels,
        "response_mask": batch.mask.long(),
        "old_log_probs": batch.old_log_probs,
        "advantages": batch.advantages,
        "token_level_scores": batch.advantages,
    }
    rows = range(len(ids))
    names = {"uid": [f"prompt-{row}" for row in rows], "data_source": ["reference"] * len(ids)}
    others = {name: np.array(values, dtype=object) for name, values in names.items()}
    others["multi_modal_inputs"] = np.array([{} for _ in rows], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


# ---- in the process that asks them


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write spiking.json and spiking.md."""
    options = with_worlds(parser("spiking", __doc__))
    add = options.add_argument
    add("--case", action="append", choices=tuple(_ANY), help="only this one (repeatable)")
    add("--dtype", action="append", choices=tuple(LIMITS), help="compute in this alone (repeatable)")
    add("--times", type=int, default=10, help="updates of each case with the search, and without")
    add("--response", type=int, default=32, help="tokens of each of a rank's eight answers")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.update(_KEPT)
    with tempfile.TemporaryDirectory() as scratch:
        _, tree = trees(parsed.tree)
        with World(parsed.ranks, path=(str(tree),), timeout_s=1800) as world:
            chosen = parsed.case or list(_ANY), parsed.dtype or list(LIMITS)
            measured = measure(world, *chosen, parsed.times, parsed.response, Path(scratch), parsed.out)
    run = {"command": as_typed("spiking", arguments), **measured}
    finish(run, parsed.out, "spiking", markdown(run))
    return 0


def measure(
    world: World, cases: list[str], dtypes: list[str], times: int, length: int, scratch: Path, out: Path
) -> dict[str, Any]:
    """Measure the cases and return the record; see the module."""
    path = pretrained.folder(REPO / ".gradloc")
    model, source = pretrained.Pretrained(path), pretrained.text(path)
    rows = _PER_RANK * world.size
    batches = [pretrained.continued(model, source, rows, length, seed) for seed in range(_HEALTHY + 1)]
    norms = {}
    for dtype in dtypes:
        world.run("lab.benchmarks.spiking.prepare", model=str(path), folder=str(scratch / "events"), dtype=dtype)
        world.run("lab.benchmarks.spiking.watch", dtype=dtype, threshold=math.inf, num_tokens=rows * length)
        healthy = [_update(world, dtype=dtype, batch=batch, way="with") for batch in batches[:-1]]
        norms[dtype] = median(result["norm"] for result in healthy)
        threshold = _THRESHOLD * norms[dtype]
        world.run("lab.benchmarks.spiking.watch", dtype=dtype, threshold=threshold, num_tokens=rows * length)
    run = {
        "core_sha256": digest(),
        "machine": MACHINE,
        "weights": sum(param.numel() for param in model.parameters()),
        "ranks": world.size,
        "tokens": rows * length,
        "healthy_norm": norms,
        "cases": [],
    }
    progress = Progress(len(cases) * len(dtypes) * 2 * times + (_FIRST in dtypes))
    for number, case in enumerate(cases):
        planted = {dtype: plant(model, batches[-1], norms[dtype], SIZES.get(case)) for dtype in dtypes}
        result: dict[str, Any] = {dtype: {"with": [], "without": [], "published": []} for dtype in dtypes}
        ways = [(way, dtype) for _ in range(times) for dtype in dtypes for way in ("with", "without")]
        for dtype in dtypes if number == 0 else ():  # the first search allocates memory
            _update(world, dtype=dtype, batch=planted[dtype][0], way="with")
        if number == 0 and _FIRST in dtypes:  # the published search's cost does not depend on the spike
            ways.append(("published", _FIRST))
        for way, dtype in ways:
            batch, is_alone = planted[dtype][0], case == "batch_alone"
            result[dtype][way].append(_update(world, dtype=dtype, batch=batch, way=way, is_alone=is_alone))
            progress.step(f"{case} {dtype} {way}: {result[dtype][way][-1]['seconds']:.1f} s")
        for dtype in dtypes:
            place = {"case": case, "dtype": dtype, "planted": planted[dtype][1], "load": os.getloadavg()[0]}
            run["cases"].append({**place, **result[dtype]})
        write(run, out, "spiking")
    return run


def _update(world: World, **settings: Any) -> dict[str, Any]:
    """Update on all ranks; return the first rank's result, with the slowest rank's time and all processor time."""
    result = world.run("lab.benchmarks.spiking.update", **settings)
    return {**result[0], **spent(result), "load": os.getloadavg()[0]}


def plant(
    model: pretrained.Pretrained, batch: Batch, healthy_norm: float, sizes: Sequence[float] | None
) -> tuple[Batch, list[Place]]:
    """Make a batch spike.

    Args:
        model: unsharded, in float32.
        batch: healthy.
        healthy_norm: the median norm of healthy steps.
        sizes: gradient norms of the tokens to plant, one in a row, in healthy norms; None scales the whole batch.

    Returns:
        The batch, and the (row, position) of each planted token.
    """
    if sizes is None:
        return batch.edited(advantages=100 * batch.advantages), []
    num_rows, length = batch.labels.shape
    draw = random.Random(0)
    places = [(row, draw.randrange(length)) for row in draw.sample(range(num_rows), len(sizes))]
    units = Oracle(model, batch.planted(dict.fromkeys(places, 1.0))).norms(places)
    advantages = {
        place: draw.choice((1, -1)) * size * healthy_norm / units[place]
        for place, size in zip(places, sizes, strict=True)
    }
    return batch.planted(advantages), places


def markdown(run: Record) -> str:
    """Return a table with a row for each case and precision."""
    rows = [HEAD]
    for case in run["cases"]:
        dtype, first = case["dtype"], case["with"][0]
        without = median(result["seconds"] for result in case["without"])
        named, planted = ({tuple(place) for place in places} for places in (first["named"], case["planted"]))
        recall = f"{len(named & planted) / len(planted):.2f}" if planted else "-"
        ours, theirs = (
            [f"{ratio_of(case, way, of):.2f}" if case[way] else "-" for of in _CLOCKS] for way in ("with", "published")
        )
        cells = [case["case"], dtype, *ours, f"{LIMITS[dtype][case['case']]:.1f}", f"{without:.1f}"]
        cells += [str(first["cost_f"]), _closure(first), recall, str(len(named - planted)), first["verdict"], *theirs]
        rows.append([*cells, str(case["published"][0]["cost_f"]) if case["published"] else "-"])
    return f"`{run['command']}`\n\n{table(rows)}"


def _closure(result: dict[str, Any]) -> str:
    closure, error = (result.get(key) for key in ("closure", "closure_error"))
    return "-" if closure is None else f"{closure:.3f}" + ("" if error is None else f" ± {error:.3f}")


def ratio_of(case: dict[str, Any], way: str, clock: str = "seconds") -> float:
    """Return the ratio of an update's median times with ``way`` and without the search."""
    return median(result[clock] for result in case[way]) / median(result[clock] for result in case["without"])


if __name__ == "__main__":
    sys.exit(main())
