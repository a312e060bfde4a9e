# SPDX-License-Identifier: Apache-2.0
"""Print what a run's `events.jsonl` found, and whether it is what the demo planted.

The first part reads the events only. The second compares them with `planted.json`, which the demo's fault wrote. The
exit code is 0 only if one event names exactly the planted token and its certificate explains the spike.

    python -m lab.experiments.verdict RUN_DIR

Standard library only.
"""

import argparse
import json
import sys
from pathlib import Path

from lab.experiments.errors import ExperimentError


def read_events(run_dir: Path) -> list[dict]:
    """Return the events of a run, in order; none if there is no file.

    Raises:
        ExperimentError: if a line is not JSON.
    """
    return read_lines(run_dir / "gradloc" / "events.jsonl")


def read_lines(path: Path) -> list[dict]:
    """Return every line of a JSON-lines file; none if there is no file.

    Raises:
        ExperimentError: if a line is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [_parse(line, f"line {number} of {path}") for number, line in enumerate(lines, start=1)]


def read_planted(path: Path) -> dict:
    """Return the record that the fault wrote.

    Raises:
        ExperimentError: if it was not planted, or the record cannot be read.
    """
    if not path.is_file():
        raise ExperimentError(f"nothing was planted ({path} does not exist): the run ended before the fault's step.")
    return _parse(path.read_text(encoding="utf-8"), str(path))


def _parse(text: str, place: str) -> dict:
    try:
        return json.loads(text)
    except ValueError:
        raise ExperimentError(f"{place} is not JSON: the run was cut off while writing it.") from None


def describe(event: dict) -> str:
    """Describe an event in a few lines: verdict, each culprit's place and sentence, the search."""
    lines, search = [event["verdict"]], event["search"]
    for culprit in event["culprits"]:
        sentence = f"{culprit['text_before'] or ''}>>>{''.join(culprit['tokens'])}<<<{culprit['text_after'] or ''}"
        lines += [
            f"  culprit: rank {culprit['rank']}, micro-batch {culprit['micro_batch']}, row "
            f"{culprit['micro_batch_row']} of it, response position {culprit['positions'][0]}",
            f"    {sentence!r}",
        ]
    spent = f"{search['backwards']} probes and {search['seconds']:.2g} s"
    return "\n".join([*lines, f"  {search['strategy']} took {spent}; action: {event['action']['taken']}"])


def compare(events: list[dict], planted: dict) -> list[str]:
    """Return every difference between the events and the planted token; empty if there is none."""
    if not events:
        return ["no event was written: the spike did not trigger, or localization failed"]
    problems = []
    if len(events) > 1:
        steps = ", ".join(str(event["step"]["global_step"]) for event in events)
        problems.append(f"one event was expected, {len(events)} were written (steps {steps})")
    at_step = [e for e in events if e["step"]["global_step"] == planted["step"]]
    if not at_step:
        return [*problems, f"no event is at step {planted['step']}, where the fault is"]
    event = at_step[0]
    culprits, wanted = event["culprits"], expected(planted, event["step"])
    if len(culprits) != 1:
        problems.append(f"one culprit was expected, {len(culprits)} are named")
    misses = [
        [f"{key} is {culprit[key]}, and {value} was planted" for key, value in wanted.items() if culprit[key] != value]
        for culprit in culprits
    ]
    problems += min(misses, key=len, default=[])
    if event["certificate"]["verdict"] != "explained":
        problems.append(f"the certificate says {event['certificate']['verdict']}, not explained")
    return problems


def expected(planted: dict, step: dict) -> dict:
    """Return the fields of a culprit that names the planted token.

    verl gives rank r the r-th equal part of the batch's rows, and splits it into mini-batches and micro-batches in
    order, so the row determines the rank and the micro-batch. TRL names no prompts.
    """
    rows_per_rank = planted["num_rows"] // step["dp_size"]
    rows_per_mini = rows_per_rank // step["num_mini_batches"]
    rows_per_micro = rows_per_mini // step["num_micro_batches"]
    in_mini = planted["row"] % rows_per_rank % rows_per_mini
    names = {"sequence_id": f"{planted['uid']}:{planted['rollout_index']}"} if "uid" in planted else {}
    return {
        **names,
        "positions": [planted["position"]],
        "token_ids": [planted["token_id"]],
        "rank": planted["row"] // rows_per_rank * (step["world_size"] // step["dp_size"]),
        "micro_batch": in_mini // rows_per_micro,
        "micro_batch_row": in_mini % rows_per_micro,
    }


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args(argv).run_dir
    try:
        events = read_events(run_dir)
        print("\nWhat events.jsonl says")
        print("\n".join(map(describe, events)) or "  nothing: no event was written")
        planted = read_planted(run_dir / "planted.json")
        problems = compare(events, planted)
    except ExperimentError as error:
        print(f"verdict: {error}", file=sys.stderr)
        return error.exit_code
    print("\nWhat the demo planted")
    whose = "rollout {rollout_index} of prompt {uid}" if "uid" in planted else "row {row} of the batch"
    said = "  step {step}, " + whose + ", response position {position}, token id {token_id} (seed {seed})"
    print(said.format_map(planted))
    if problems:
        print("NOT FOUND AS PLANTED: " + "; ".join(problems))
        return 1
    print("FOUND: the event names exactly the token that was planted, and nothing else.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
