# SPDX-License-Identifier: Apache-2.0
"""Print the events of each run of `two-nodes`, and whether every file is where the docs say. Standard library only."""

import json
import os
from pathlib import Path

from lab.experiments import summaries, verdict
from lab.experiments.errors import ExperimentError

FOUND = "FOUND, and everything is in its place"
LEGEND = "events: how many; each names the planted token alone. files: those that docs/bundle.md lists."
EVENTS = "events/of this run"
"""`bisect_dump_dir` of lab/experiments/two-nodes.yaml: relative to the working folder of the driver's node."""


def problems_of(run_dir: Path, resumed_from: Path | None) -> tuple[list[dict], list[str]]:
    """Return a run's events, and every difference from docs/configuration.md and docs/bundle.md.

    Args:
        run_dir: the run's folder.
        resumed_from: the checkpoint that it started from, or None.

    Raises:
        ExperimentError: if a file cannot be read.
    """
    roots = sorted(run_dir.glob(f"**/{EVENTS}"))
    if len(roots) != 1 or roots[0].parents[1].parent != run_dir:
        return [], [f"one node's working folder was to hold {EVENTS}, and these do: {[str(root) for root in roots]}"]
    (root,) = roots
    events = verdict.read_lines(root / "events.jsonl")
    problems = verdict.compare(events, verdict.read_planted(run_dir / "planted.json"))
    for event in events:
        step, bundle = event["step"], root / event["folder"]
        problems += absent(bundle, ("batch.safetensors", "meta.json", "sequences.json"))
        meta = json.loads((bundle / "meta.json").read_text(encoding="utf-8"))
        weights = root / "weights" / f"global_step_{step['global_step']}" / "actor"
        shards = [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
        problems += absent(weights, (*shards, "fsdp_config.json", "huggingface"))
        if meta["checkpoint"] != str(weights):
            problems.append(f"the bundle says that the weights are in {meta['checkpoint']}, and they are in {weights}")
        last = event["consequence"]["last_checkpoint"]
        if last != (None if resumed_from is None else str(resumed_from)):
            problems.append(f"the last checkpoint is said to be {last}")
    return events, problems


def absent(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Return a sentence for each file that the folder lacks."""
    return [f"{folder / name} is not there" for name in names if not (folder / name).exists()]


def make(runs: list[summaries.Run], _folder: Path) -> list[summaries.Table]:
    """Print every run's events, and return a table of them.

    Raises:
        ExperimentError: if a run's files are not where the docs say.
    """
    table, wrong = [["run", "events", "files"]], list[str]()
    for folder, cell in runs:
        run_dir, given = folder.resolve(), dict(text.split("=", 1) for text in cell["overrides"])
        path = given.get("trainer.resume_from_path", "").replace("${demo.run_dir}", str(run_dir))
        events, problems = problems_of(run_dir, Path(os.path.normpath(path)) if path else None)
        print(f"\n{cell['folder']}: what events.jsonl says")
        print("\n".join(map(verdict.describe, events)) or "  nothing: no event was written")
        wrong += [f"{cell['folder']}: {problem}" for problem in problems]
        table.append([cell["folder"], str(len(events)), FOUND])
    if wrong:
        raise ExperimentError("NOT AS IT SHOULD BE: " + "; ".join(wrong))
    return [table]
