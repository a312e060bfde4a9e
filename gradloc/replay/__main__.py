# SPDX-License-Identifier: Apache-2.0
"""Replay an event on one machine: ``gradloc replay BUNDLE --model PATH``.

Runs the bundled micro-batches on transformers' model, each backward from the coefficients that the run's own left;
localizes the spike again and compares the culprits with the event's. ``--oracle`` also measures every token's gradient
by a backward of its own. Exit code 0: the same culprits; 1: different ones; 2: cannot be replayed, and why.
"""

import argparse
import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..core.gradients import GradientSpace
from ..core.probe import Prober
from ..core.ranks import Ranks
from ..explain.numbers import bounded, number
from ..explain.text import printable
from ..notify.background import error_text
from ..record import SCHEMA_VERSION, Search, Trigger
from ..record.files import write_whole
from ..record.store import plain
from ..search.find import localize
from ..search.limit import BUDGET, MAX_CULPRITS, STRATEGIES, Limit
from ..search.task import Task
from ..trigger import Spike, spike_kind
from . import comparison
from .bundle import Bundle, ReplayError, check, read_bundle
from .model import load
from .step import ReplayStep


def replay(bundle_path: str, model_path: str, strategy: str | None, oracle: bool, budget: int | None) -> dict[str, Any]:
    """Replay an event by the command's arguments, and return what ``--json`` writes.

    Raises:
        ReplayError: one sentence, where the event cannot be replayed.
    """
    bundle = read_bundle(bundle_path)
    event, expected = bundle.event, comparison.named_by_event(bundle)
    settings = _search_settings(event.search, strategy, budget)
    max_culprits = bundle.max_culprits or MAX_CULPRITS
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model, ranks = load(model_path, bundle, device), Ranks(device=device)
    with tqdm(disable=None, leave=False) as bar:  # None: it draws only in a terminal
        step, space = ReplayStep(model, bundle, device, bar.update), GradientSpace(model)
        weights = comparison.compare_weights(bundle, space, model_path)
        bar.set_description("gradient")
        step.train()
        space.scale(1.0 / step.loss_scale)
        comparison.refuse_nan(bundle, step)
        spike = _spike(bundle, space.norm())
        bar.set_description("search")
        finding = localize(step, space, ranks, spike, 1.0, max_steps=math.inf, max_culprits=max_culprits, **settings)
        replayed, answer = comparison.named_by_replay(finding.culprits, bundle), None
        if oracle:
            bar.set_description("oracle")
            limit, prober = Limit(step.num_micro_batches, math.inf), Prober(step, space, ranks)
            task = Task(prober, space.take(), 1.0, spike, finding.tau, max_culprits, limit)
            answer = comparison.ask_oracle(task, bundle, replayed)
    verdict = "nothing_to_compare"
    if expected:  # tokens are compared, however they are grouped into spans
        is_same = comparison.tokens_of(expected) == comparison.tokens_of(replayed)
        verdict = "same" if is_same else "different"
    num_micro_batches = (event.step.num_micro_batches or 0) * (event.step.dp_size or 0)
    counts = {"forwards": finding.num_forwards, "backwards": finding.num_backwards, "seconds": finding.seconds}
    return {
        "schema_version": SCHEMA_VERSION,
        "bundle": bundle_path,
        "model": model_path,
        "event_id": event.event_id or None,
        "step": vars(event.step),
        "device": device.type,
        "micro_batches": {"replayed": len(bundle.layout), "is_whole_step": len(bundle.layout) == num_micro_batches},
        "has_beside": bool(bundle.meta.has_beside),
        "weights": weights,
        "norm": {"event": event.trigger.grad_norm, "replay": spike.grad_norm},
        "threshold": event.trigger.threshold,
        "search": {**settings, "status": finding.status, "stop_reason": finding.stop_reason, **counts},
        "certificate": vars(finding.certificate),
        "culprits": comparison.side_by_side(expected, replayed),
        "verdict": verdict,
        "oracle": answer,
    }


def _search_settings(search: Search, strategy: str | None, budget: int | None) -> dict[str, Any]:
    """Return the strategy and the budget: the command's, else the event's, which one written by hand may lack."""
    strategy = strategy or ("auto" if search.strategy == Search.strategy else search.strategy)
    check(strategy in STRATEGIES, f"The strategy {strategy!r} is not known; there are {', '.join(STRATEGIES)}.")
    return {"strategy": strategy, "budget": budget or search.budget or BUDGET}


def _spike(bundle: Bundle, norm: float) -> Spike:
    """Return the event's spike with the replayed norm; an event written by hand may not name its kind."""
    trigger = bundle.event.trigger
    rule = "fixed" if trigger.kind == Trigger.kind else trigger.kind
    kind = spike_kind(norm, trigger.threshold, rule) or rule
    return Spike(kind, norm, trigger.threshold, trigger.tau, bundle.num_tokens)


_VERDICTS = {
    "same": "The same culprits as in the event.",
    "different": "NOT the same culprits as in the event.",
    "nothing_to_compare": "The bundle names no culprits to compare with.",
}


def render(record: dict[str, Any]) -> str:
    """Return the record of :func:`replay` as text."""
    certificate, search, batches = record["certificate"], record["search"], record["micro_batches"]
    step, norm, oracle, culprits = (record[name] for name in ("step", "norm", "oracle", "culprits"))
    whole = "the whole step" if batches["is_whole_step"] else "a part of the step; only its gradient is replayed"
    without = ", without what passes through no token, which the run's loss had" if record["has_beside"] else ""
    at = f", step {step['global_step']}, epoch {step['epoch']}, mini-batch {step['mini_batch']}"
    counts = f"{search['forwards']} forwards and {search['backwards']} backwards in {search['seconds']:.1f} s"
    norms = f"event {_figure(norm['event'])}, replay {_figure(norm['replay'])}"
    after = "".join(bounded(*(float(certificate[name]) for name in ("norm_after", "error_bound")), 6))
    lines = [
        f"event        {record['event_id']}{at if step['global_step'] else ''}",  # one written by hand may not say
        f"replayed     {batches['replayed']} micro-batches ({whole}) on {record['device']}{without}",
        f"weights      {record['weights']['sentence']}",
        f"norm         {norms}, threshold {_figure(record['threshold'])}",
        f"search       {search['strategy']}: {counts}; {search['stop_reason']}",
        f"certificate  {certificate['verdict']}; norm {after} without the culprits; {certificate['reason']}",
    ]
    for row in culprits:
        lines.append(f"culprit      {_place(row)}, {row['span']}: {_said(row['replay'])}; event: {_said(row['event'])}")
    if oracle is not None:
        recall = "no token is a culprit alone" if oracle["recall"] is None else f"recall {oracle['recall']:.0%}"
        lines.append(
            f"oracle       {oracle['num_tokens']} tokens measured one by one: {oracle['num_culprits']} have a norm of "
            f"{_figure(oracle['threshold'])} or more; {recall}, {len(oracle['false_positives'])} false positives"
        )
        lines += [f"  {_place(row)}: {_said(row)}{', named' * row['is_named']}" for row in oracle["top"]]
    return "\n".join([*lines, "", _VERDICTS[record["verdict"]]])


def _place(row: dict[str, Any]) -> str:
    first, last = row["positions"][0], row["positions"][-1]
    at = f"position {first}" if first == last else f"positions {first}-{last}"
    return f"rank {row['rank']}, micro-batch {row['micro_batch']}, row {row['micro_batch_row']}, {at}"


def _said(named: dict[str, Any] | None) -> str:
    return "not named" if named is None else f"norm {_figure(named['grad_norm'])}, share {_figure(named['share'])}"


def _figure(value: Any) -> str:
    return value if isinstance(value, str) else number(value, 6, "unknown")


EPILOG = """\
example:
  gradloc replay runs/demo-1/gradloc/events/step000024-epoch0-mini0 --model MODEL_PATH

exit codes:
  0  the same culprits, or none to compare with
  1  others
  2  cannot be replayed
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="gradloc replay",
        description="Replay a gradient spike from its bundle and compare the culprits with the event's.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", metavar="EVENT", help="an event's folder: DUMP_DIR/events/EVENT_ID")
    weights_help = "the weights before the step: a Hugging Face folder, or a checkpoint folder of verl's FSDP workers "
    weights_help += "(global_step_N/actor), whose shards are put together in memory, in their own precision"
    parser.add_argument("--model", required=True, metavar="PATH", help=weights_help)
    parser.add_argument("--strategy", choices=STRATEGIES, help="of the search (default: the event's own)")
    parser.add_argument("--oracle", action="store_true", help="also measure every token by a backward of its own")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write it as JSON to this file")
    parser.add_argument("--budget", type=int, metavar="N", help="probes at most (default: the event's own)")
    parser.error = lambda message: parser.exit(2, f"gradloc: {message}; see gradloc replay --help.\n")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", UserWarning)  # what torch warns of is the run's own choice
    try:
        check(args.bundle and args.model, "one of the words is empty: a variable of the shell may have no value.")
        check(str(args.output) != "-", "-o names a file: leave it out, and --json prints the same to standard output.")
        has_folder = args.output is None or args.output.absolute().parent.is_dir()
        check(has_folder, f"-o {args.output}: there is no such folder.")
        check(args.output is None or not args.output.is_dir(), f"-o {args.output} is a folder: name the file to write.")
        check(args.budget is None or args.budget > 0, f"--budget {args.budget}: must be at least 1.")
        record = plain(replay(args.bundle, args.model, args.strategy, args.oracle, args.budget))
        as_json = json.dumps(record, indent=2, allow_nan=False)
        print(as_json if args.json else printable(render(record)), flush=True)
        if args.output is not None:
            write_whole(args.output, f"{as_json}\n")
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except Exception as error:  # never 1, which says that the culprits are others
        said = str(error)
        if any(sign in repr(error) for sign in ("MemoryError", "allocate memory")):
            said = "The memory ran out: use a larger machine."
        elif isinstance(error, OSError) and error.filename:
            said = f"{error.filename}: {error.strerror}."
        elif not isinstance(error, ReplayError | OSError):
            said = f"{args.bundle} cannot be replayed on {args.model}: {error_text(error)}."
            logging.getLogger(__name__).debug("the error", exc_info=True)
        print(f"gradloc: {printable(said)}", file=sys.stderr)
        return 2
    return 1 if record["verdict"] == "different" else 0


if __name__ == "__main__":
    sys.exit(main())
