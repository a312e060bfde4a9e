# SPDX-License-Identifier: Apache-2.0
"""Replay an event on one machine: ``python -m gradloc.replay BUNDLE --model PATH``.

Rebuilds the trainer's actor around the given weights, re-runs the bundled micro-batches with the recorded random
numbers, localizes the spike again and compares the culprits with the event's. ``--oracle`` also measures every token's
gradient by a backward of its own. Exit code 0: the same culprits; 1: different ones; 2: cannot be replayed, and why.
"""

import argparse
import importlib
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..core.gradients import GradientSpace
from ..core.probe import Prober
from ..core.ranks import Ranks
from ..record import SCHEMA_VERSION, Search
from ..record.store import plain
from ..search.find import BUDGET, MAX_CULPRITS, STRATEGIES, localize
from ..search.task import Limit, Task
from ..words.numbers import bounded, number
from . import comparison
from .bundle import Bundle, ReplayError, read_bundle
from .dealt import deal

_ADAPTERS = {
    "verl07": ("", "verl 0.7.0 or 0.7.1 and the patch on it (gradloc-patch --repo VERL)"),
    "verl09": (" of a run on verl 0.9", "verl 0.9 and gradloc installed beside it"),
    "trl": (" of a run on TRL", "trl and gradloc installed beside it"),
}
"""Whose ``rebuild`` makes the trainer's step from a bundle: the run's trainer, and what must be installed."""


def replay(
    bundle_path: str, model_path: str, strategy: str | None = None, oracle: bool = False, budget: int | None = None
) -> dict[str, Any]:
    """Replay an event; all processes of a torchrun call this together and get the same.

    Args:
        bundle_path: the bundle's folder.
        model_path: a Hugging Face model folder, or a checkpoint folder of verl's FSDP workers.
        strategy: of the search; None for the event's own.
        oracle: also measure every token alone.
        budget: largest number of probes; None for the event's own.

    Returns:
        What ``--json`` writes; ``verdict`` is ``same``, ``different`` or ``nothing_to_compare``.

    Raises:
        ReplayError: one sentence that says why it cannot be replayed.
    """
    bundle = read_bundle(bundle_path)
    expected = comparison.named_by_event(bundle)
    settings = _settings(bundle, strategy, budget)
    adapter = _adapter(bundle)
    adapter.start_processes()
    actor = adapter.build_actor(bundle, model_path)
    ranks = Ranks(device=torch.device(actor.device_name))
    places = deal(bundle, ranks.size)
    # None: tqdm draws only in a terminal
    with tqdm(disable=None if ranks.is_first else True, leave=False) as bar:

        def begin(phase: str, total: int | None = None) -> None:
            bar.total = total
            bar.set_description(phase, refresh=False)
            bar.reset()

        step = adapter.ReplayStep(actor, bundle, places[ranks.rank], bar.update)
        space = GradientSpace(actor.actor_module)
        weights = comparison.compare_weights(bundle, space, model_path)
        begin("gradient", step.num_micro_batches)
        step.train(space)
        comparison.refuse_nan(step, ranks, bundle)
        spike = bundle.spike(space.norm())
        begin("search")
        finding = localize(step, space, ranks, spike, 1.0, **settings)
        replayed = comparison.named_by_replay(finding, bundle, places)
        answer = None
        if oracle:
            begin("oracle", sum(int(bundle.token_mask(entry).sum()) for entry in bundle.layout))
            limit, prober = Limit(step.num_micro_batches, math.inf), Prober(step, space, ranks)
            task = Task(prober, space.take(), 1.0, spike, finding.tau, settings["max_culprits"], limit)
            answer = comparison.ask_oracle(task, bundle, places, replayed)
    return {
        "schema_version": SCHEMA_VERSION,
        "bundle": str(bundle.folder),
        "model": model_path,
        "event_id": bundle.event.event_id or None,
        "step": vars(bundle.event.step),
        "num_processes": ranks.num_processes,
        "device": actor.device_name,
        "micro_batches": {"replayed": len(bundle.layout), "is_whole_step": bundle.is_whole},
        "weights": weights,
        "norm": {"event": bundle.event.trigger.grad_norm, "replay": spike.grad_norm},
        "threshold": spike.threshold,
        "search": {
            "strategy": settings["strategy"],
            "budget": settings["budget"],
            "status": finding.status,
            "stop_reason": finding.result.stop_reason,
            "forwards": finding.num_forwards,
            "backwards": finding.num_backwards,
            "seconds": finding.seconds,
        },
        "certificate": vars(finding.certificate),
        "culprits": comparison.side_by_side(expected or [], replayed),
        "verdict": comparison.verdict(expected, replayed),
        "oracle": answer,
    }


def _adapter(bundle: Bundle) -> Any:
    """By name: this room imports no adapter, and verl's workers take seconds to import."""
    if (bundle.event.run.trainer or "").startswith("trl"):
        name = "trl"
    else:
        name = "verl09" if str(bundle.meta.actor.get("_target_")).startswith("gradloc.") else "verl07"
    try:
        return importlib.import_module(f"..adapters.{name}.rebuild", __package__)
    except ImportError as error:
        run, needed = _ADAPTERS[name]
        raise ReplayError(f"An event{run} is replayed with {needed}: there is no {error.name} here.") from error


def _settings(bundle: Bundle, strategy: str | None, budget: int | None) -> dict[str, Any]:
    """Of the search: as asked for, else as in the event, else the defaults. No limit on time: nothing waits."""
    actor, search = bundle.meta.actor, bundle.event.search
    if strategy is None:
        strategy = "auto" if search.strategy == Search.strategy else search.strategy  # one by hand may not say
    if strategy not in STRATEGIES:
        raise ReplayError(f"The strategy {strategy!r} is not known; there are {', '.join(STRATEGIES)}.")
    of_run = (actor.get("gradloc") or {}).get("search") or {}
    return {
        "strategy": strategy,
        "budget": budget or search.budget or actor.get("bisect_budget_steps") or BUDGET,
        "max_culprits": of_run.get("max_culprits") or MAX_CULPRITS,
        "max_steps": math.inf,
    }


# ---- what the person reads


def render(record: dict[str, Any]) -> str:
    """The record of :func:`replay` as text."""
    certificate, search, batches = record["certificate"], record["search"], record["micro_batches"]
    whole = "the whole step" if batches["is_whole_step"] else "a part of the step; only its gradient is replayed"
    after, bound = (float(certificate[name]) for name in ("norm_after", "error_bound"))  # "NaN" is spelled out
    where = f"{record['num_processes']} process{'es' if record['num_processes'] > 1 else ''} on {record['device']}"
    step, norm = record["step"], {side: _figure(value) for side, value in record["norm"].items()}
    at = f", step {step['global_step']}, epoch {step['epoch']}, mini-batch {step['mini_batch']}"
    lines = [
        f"event        {record['event_id']}{at if step['global_step'] else ''}",  # one written by hand may not say
        f"replayed     {batches['replayed']} micro-batches ({whole}), {where}",
        f"weights      {record['weights']['sentence']}",
        f"norm         event {norm['event']}, replay {norm['replay']}, threshold {_figure(record['threshold'])}",
        f"search       {search['strategy']}: {search['forwards']} forwards and {search['backwards']} backwards in "
        f"{search['seconds']:.1f} s; {search['stop_reason']}",
        f"certificate  {certificate['verdict']}: {''.join(bounded(after, bound, 6))} without the culprits; "
        f"{certificate['reason']}",
    ]
    if record["culprits"]:
        lines += ["", *_table([_culprit_row(culprit) for culprit in record["culprits"]])]
    if record["oracle"] is not None:
        lines += ["", *_oracle_lines(record["oracle"])]
    return "\n".join([*lines, "", _VERDICTS[record["verdict"]]])


_VERDICTS = {
    "same": "The same culprits as in the event.",
    "different": "NOT the same culprits as in the event.",
    "nothing_to_compare": "The bundle names no culprits to compare with.",
}


def _culprit_row(culprit: dict[str, Any]) -> dict[str, str]:
    first, last = culprit["positions"][0], culprit["positions"][-1]
    row = {
        "rank": str(culprit["rank"]),
        "micro-batch": str(culprit["micro_batch"]),
        "row": str(culprit["micro_batch_row"]),
        "positions": str(first) if first == last else f"{first}-{last}",
        "span": culprit["span"],
    }
    for side in ("event", "replay"):
        named = culprit[side]
        row[f"norm: {side}"] = "not named" if named is None else _figure(named["grad_norm"], "-")
        row[f"share: {side}"] = "-" if named is None else _figure(named["share"], "-")
    return row


def _oracle_lines(oracle: dict[str, Any]) -> list[str]:
    recall = "no token is a culprit alone" if oracle["recall"] is None else f"recall {oracle['recall']:.0%}"
    head = (
        f"oracle       {oracle['num_tokens']} tokens measured one by one: {oracle['num_culprits']} have a norm of "
        f"{_figure(oracle['threshold'])} or more; {recall}, {len(oracle['false_positives'])} false positives"
    )
    rows = [
        {
            "rank": str(token["rank"]),
            "micro-batch": str(token["micro_batch"]),
            "row": str(token["micro_batch_row"]),
            "position": str(token["position"]),
            "norm": _figure(token["grad_norm"]),
            "share": _figure(token["share"]),
            "": "named" if token["is_named"] else "",
        }
        for token in oracle["top"]
    ]
    return [head, *_table(rows)]


def _table(rows: list[dict[str, str]]) -> list[str]:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in widths}, *rows]
    return ["  ".join(line[name].rjust(width) for name, width in widths.items()).rstrip() for line in lines]


def _figure(value: Any, unknown: str = "none") -> str:
    return value if isinstance(value, str) else number(value, 6, unknown)


# ---- the command


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Replay a gradient spike from its bundle and compare the culprits with the event's.",
        epilog="Exit code 0: the same culprits (or none to compare with); 1: different ones; 2: cannot be replayed.",
    )
    parser.add_argument("bundle", help="an event's folder: DUMP_DIR/events/EVENT_ID")
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="the weights before the step: a Hugging Face folder, or a checkpoint folder of verl's FSDP workers "
        "(global_step_N/actor), whose shards are put together in memory, in their own precision",
    )
    parser.add_argument("--strategy", choices=STRATEGIES, help="of the search (default: the event's own)")
    parser.add_argument("--oracle", action="store_true", help="also measure every token by a backward of its own")
    parser.add_argument("--json", metavar="OUT", help="also write the answer to this file")
    parser.add_argument("--budget", type=_positive, metavar="N", help="probes at most (default: the event's own)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _is_out_of_memory(error: BaseException | None) -> bool:
    if error is None:
        return False
    is_it = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return is_it or _is_out_of_memory(error.__cause__)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = _parse(argv)
    is_first = int(os.environ.get("RANK", 0)) == 0
    warnings.simplefilter("ignore", UserWarning)  # what verl and torch warn of is the run's own choice
    try:
        if args.json is not None and not Path(args.json).absolute().parent.is_dir():
            raise ReplayError(f"--json {args.json}: there is no such folder.")
        record = plain(replay(args.bundle, args.model, args.strategy, args.oracle, args.budget))
    except ReplayError as error:
        if is_first:
            print(f"replay: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print("replay: The memory ran out: use more processes (torchrun) or a larger machine.", file=sys.stderr)
        return 2
    if is_first:
        print(render(record))
        if args.json is not None:
            Path(args.json).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 1 if record["verdict"] == "different" else 0


if __name__ == "__main__":
    code = main()
    if code != 2 and torch.distributed.is_initialized():  # after a failure the peers may not come
        torch.distributed.destroy_process_group()
    sys.exit(code)
