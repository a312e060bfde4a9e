# SPDX-License-Identifier: Apache-2.0
"""The price of a step that spikes: verl 0.7's real actor on a pretrained language model, with the search and without.

    python -m benchmarks.spiking                              # SmolLM2-135M, two ranks of four micro-batches each
    python -m benchmarks.spiking --case eight --times 3 --tree ~/verl

An update with the search is the trainer's whole step of it: looking, the driver's part, and the event on disk. One
without is the same update of the same batch with gradloc's hook set aside. Both in turn, the weights left as they are
(lr 0), so that every repetition meets the same spike. `published` is the search of benchmarks.localization.published in
the place of ours, without certificate or event. Writes spiking.json, anew after every case.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.digest import REPO, digest
from benchmarks.healthy import trees
from benchmarks.localization import pretrained
from benchmarks.localization.published import descend
from benchmarks.localization.scenarios import SCENARIOS, Planted, Planter, count_scenario
from benchmarks.progress import Progress
from tests.bare import Batch
from tests.world import World, harness

CASES = {"single": 2.0, "thousandfold": 2.0, "eight": 3.0, "batch": 3.0}
"""By name: how many times as long as without the search an update may take."""
_PER_RANK = 8  # rows: four micro-batches of two
_HEALTHY = 5  # updates that the running norm is judged by, and that tell what is typical
_THRESHOLD = 4.0  # times the healthy norm: the least that the trigger ever asks for
_SETTINGS = [
    "actor_rollout_ref.actor.spike_detection=True",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
]
_CLOCKS = ("seconds", "cpu_seconds")
_trainers: list[Any] = []


# ---- on every rank


def prepare(model: str, folder: str) -> None:
    """verl's actor around the model of that folder; events go to the other."""
    inner = pretrained.Pretrained(Path(model)).inner
    size = f"actor_rollout_ref.actor.ppo_mini_batch_size={_PER_RANK * dist.get_world_size()}"
    _trainers.append(harness.make_trainer([*_SETTINGS, size], folder, model=inner))


def watch(threshold: float, num_tokens: int) -> None:
    """From now on a norm over this is a spike, of a step of so many tokens."""
    _trainers[0].driver.tau = threshold * num_tokens**0.5


def update(batch: Batch, way: str) -> dict[str, Any]:
    """One update.

    Args:
        batch: all ranks' rows.
        way: ``with`` the search, ``without``, or with the ``published`` one.

    Returns:
        ``seconds`` and ``cpu_seconds``, the ``norm``, and of the search ``search_seconds``, ``cost_f``, ``named`` (row,
        position) and ``verdict``; ``tracks``: the running norm's part of all updates' time so far, None where it has
        switched itself off.
    """
    trainer, data = _trainers[0], _as_verls(batch)
    localizer, driver = trainer.actor.gradloc.localizer, trainer.hook
    search = None if localizer is None else localizer._search
    told: dict[str, Any] = {}
    if way == "without":
        trainer.actor.gradloc.localizer = trainer.hook = None
    if way == "published":
        localizer._search = lambda *arguments, **_: _published(told, *arguments)
        localizer.num_failures = 0
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    out = trainer.update(data)
    told |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    trainer.actor.gradloc.localizer, trainer.hook, localizer._search = localizer, driver, search
    told["norm"] = float(out["metrics"]["actor/grad_norm"][0][0])
    for event in out["events"]:
        told |= {"search_seconds": event["search"]["seconds"], "verdict": event["certificate"]["verdict"]}
        told["cost_f"] = event["search"]["forwards"] + 2 * event["search"]["backwards"]
        told["named"] = [(c["row"], position) for c in event["culprits"] for position in c["positions"]]
    tracker = localizer._tracker
    told["tracks"] = tracker._seconds / max(tracker._update_seconds, 1e-9) if tracker.is_on else None
    return told


class _Done(Exception):
    """The published search has been timed; the step is taken as it was."""


def _published(told: dict[str, Any], step, space, ranks, spike, clip_scale, *_: Any) -> None:
    saved = space.take()
    prober = harness.part("core.probe").Prober(step, space, ranks)
    started = time.perf_counter()
    descend(prober, spike.tau)
    told |= {"search_seconds": time.perf_counter() - started, "cost_f": prober.cost}
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
    parsed = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.spiking", *(arguments or sys.argv[1:])])
    torch.set_num_threads(1)
    out = Path(parsed.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _, tree = trees(Path(scratch), parsed.tree)
        with World(parsed.ranks, path=(str(tree),), timeout_s=1800) as world:
            cases = parsed.case or list(CASES)
            run = {"command": command, **measure(world, cases, parsed.times, parsed.response, Path(scratch), out)}
    _write(run, out)
    print(markdown(run))
    return 0


def measure(world: World, cases: list[str], times: int, length: int, scratch: Path, out: Path) -> dict[str, Any]:
    """The record of the run; see the module."""
    path = pretrained.folder(REPO / ".gradloc")
    model, source = pretrained.Pretrained(path), pretrained.text(path)
    rows = _PER_RANK * world.size
    batches = [pretrained.continued(model, source, rows, length, seed) for seed in range(_HEALTHY + 1)]
    world.run("benchmarks.spiking.prepare", model=str(path), folder=str(scratch / "events"))
    world.run("benchmarks.spiking.watch", threshold=float("inf"), num_tokens=rows * length)
    healthy = [_update(world, batch, "with") for batch in batches[:-1]]
    norm = median(told["norm"] for told in healthy)
    world.run("benchmarks.spiking.watch", threshold=_THRESHOLD * norm, num_tokens=rows * length)
    run = {
        "core_sha256": digest(),
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "weights": sum(param.numel() for param in model.parameters()),
        "ranks": world.size,
        "tokens": rows * length,
        "healthy_norm": norm,
        "running_norm": healthy[-1]["tracks"],
        "cases": [],
    }
    progress = Progress(len(cases) * 2 * times + 1)
    for number, case in enumerate(cases):
        planted = _planted(case, Planter(model, batches[-1], norm, 0))
        told: dict[str, list[dict[str, Any]]] = {"with": [], "without": [], "published": []}
        # what the published search costs does not depend on the spike
        for way in ["with", "without"] * times + ["published"] * (number == 0):
            told[way].append(_update(world, planted.batch, way))
            progress.step(f"{case} {way}: {told[way][-1]['seconds']:.1f} s")
        run["cases"].append({"case": case, "planted": planted.places, "load": os.getloadavg()[0], **told})
        _write(run, out)
    return run


def _update(world: World, batch: Batch, way: str) -> dict[str, Any]:
    """The first rank's, the slowest one's seconds and the processor time of all."""
    told = world.run("benchmarks.spiking.update", batch=batch, way=way)
    # the step lasts as long as its slowest rank; processor time is spent by all of them
    spent = {"seconds": max(rank["seconds"] for rank in told), "cpu_seconds": sum(rank["cpu_seconds"] for rank in told)}
    return {**told[0], **spent, "load": os.getloadavg()[0]}


def _planted(case: str, planter: Planter) -> Planted:
    if case == "batch":  # no token's doing
        return Planted(planter.batch.edited(advantages=100 * planter.batch.advantages))
    if case == "eight":
        return SCENARIOS[case](planter)
    return count_scenario(1, {"single": 10.0, "thousandfold": 1000.0}[case])(planter)


def markdown(run: dict[str, Any]) -> str:
    """A row for each case."""
    lines = [
        f"`{run['command']}`",
        "",
        "| spike | with / without the search: wall | processor time | at most | seconds without | search (f) | recall "
        "| false | verdict | published / without: wall | processor time | published (f) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in run["cases"]:
        without = median(told["seconds"] for told in case["without"])
        first = case["with"][0]
        named, planted = ({tuple(place) for place in places} for places in (first["named"], case["planted"]))
        recall = f"{len(named & planted) / len(planted):.2f}" if planted else "-"
        ours, theirs = (
            [f"{ratio_of(case, way, of):.2f}" if case[way] else "-" for of in _CLOCKS] for way in ("with", "published")
        )
        cells = [case["case"], *ours, f"{CASES[case['case']]:.1f}", f"{without:.1f}", str(first["cost_f"]), recall]
        cells += [str(len(named - planted)), first["verdict"], *theirs]
        cells.append(str(case["published"][0]["cost_f"]) if case["published"] else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio_of(case: dict[str, Any], way: str, clock: str = "seconds") -> float:
    """How many times as long as without the search an update takes: the ratio of the medians."""
    return median(told[clock] for told in case[way]) / median(told[clock] for told in case["without"])


def _write(run: dict[str, Any], out: Path) -> None:
    (out / "spiking.json").write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.spiking", description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="only this one (repeatable)")
    parser.add_argument("--times", type=int, default=10, help="updates of each case with the search, and without")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--response", type=int, default=32, help="tokens of each of a rank's eight answers")
    parser.add_argument("--tree", help="a patched verl checkout (default: patches a copy)")
    parser.add_argument("--out", default=str(REPO / "runs" / "benchmarks" / "spiking"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
