# SPDX-License-Identifier: Apache-2.0
"""Experiments as a user runs them, with the real trainer, to their end."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.conftest import REPO


def run_to_the_end(*arguments: str, run_dir: Path, seconds: float = 900, **variables: str) -> str:
    """Return what run_experiment.sh prints, called from the run folder's parent; it must succeed."""
    printed = run_dir.parent / f"{run_dir.name}.printed"
    # Into a file: Ray's processes outlive a parent that was killed, and hold a pipe open that would be read to its end.
    with open(printed, "w") as file:
        command = [str(REPO / "run_experiment.sh"), *arguments]
        environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(run_dir), **variables}
        how = {"env": environment, "cwd": run_dir.parent, "start_new_session": True}
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **how) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = f"none within {seconds} s"
                os.killpg(process.pid, signal.SIGTERM)  # it ends the trainer, which has a session of its own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, f"exit code: {code}\n{printed.read_text()[-8000:]}"
    return printed.read_text()


def demo(*arguments: str, run_dir: Path, **how) -> list[dict]:
    """Runs a demo, which has to find its token and go on after it; returns each step's metrics.

    The shortest honest form: every part as in the demo, the fault early, and a step after it, which shows that
    training went on.
    """
    jsonschema = pytest.importorskip("jsonschema")
    printed = run_to_the_end(*arguments, run_dir=run_dir, **how)
    assert "FOUND: the event names exactly the token that was planted" in printed
    assert "to go" in printed, "a step says how long the others take"
    assert (run_dir / "report.html").is_file()
    schema = json.loads((REPO / "schema" / "event.v2.schema.json").read_text())
    (event,) = map(json.loads, (run_dir / "gradloc" / "events.jsonl").read_text().splitlines())
    jsonschema.validate(event, schema)
    steps = steps_of(run_dir)
    spike = event["step"]["global_step"]
    assert [number for number, data in enumerate(steps, 1) if data["gradloc/events"]] == [spike] and spike < len(steps)
    norms = [data["actor/grad_norm"] for data in steps]
    assert norms.pop(spike - 1) > 10 * max(norms)
    return steps


def steps_of(run_dir: Path) -> list[dict]:
    """Each step's metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}
    assert list(steps) == list(range(1, len(steps) + 1))
    return list(steps.values())


def largest_difference(steps: list[dict]) -> float:
    """Return the largest difference of a probability between rollout and trainer; small if their weights are equal."""
    return max(data["training/rollout_probs_diff_max"] for data in steps)


def explode(run_dir: Path, *more: str, **variables: str) -> None:
    """Run two arms of the explosion, with the plants early, and check norms, event, record and summary.

    Args:
        run_dir: of the suite.
        more: overrides.
        variables: of the environment.
    """
    # Every part as in the experiment. The trigger has to know healthy norms.
    early = ["demo.steps=6", "explosion.warning_step=5", "explosion.spike_step=6"]
    command = ["explosion", "--arms", "healthy,unprotected", *early, *more]
    printed = run_to_the_end(*command, run_dir=run_dir, RUNAWAY_PENALTY_MULTIPLIER="0.25", **variables)
    assert "run 2 of 2: unprotected" in printed and "2 of 2 runs ended well" in printed
    arms = run_dir / "healthy", run_dir / "unprotected"
    healthy, exploding = ([data["actor/grad_norm_max"] for data in steps_of(arm)] for arm in arms)
    assert [json.loads((arm / "knobs.json").read_text())["runaway_penalty"] for arm in arms] == [0.25] * 2
    # The same up to the plant, to the last digit; a warning; the catastrophe.
    assert healthy[:4] == exploding[:4]
    warning, spike = exploding[4:]
    assert spike > 3 * warning > 6 * max(healthy)
    event = json.loads((arms[1] / "gradloc" / "events.jsonl").read_text().splitlines()[-1])
    (culprit,) = event["culprits"]
    _, planted = map(json.loads, (arms[1] / "planted.jsonl").read_text().splitlines())
    assert event["step"]["global_step"] == planted["step"] == 6 and planted["length"] == 200
    assert [culprit[key] for key in ("positions", "token_ids")] == [planted[key] for key in ("positions", "token_ids")]
    assert culprit["values"]["advantage"] == pytest.approx(0.8)
    assert 5e4 < math.exp(culprit["values"]["log_prob"] - culprit["values"]["old_log_prob_used"]) < 1e5
    assert culprit["cause"]["label"] == "token_mismatch"
    assert "as planted" in printed and (run_dir / "summary.png").is_file()
    assert (arms[1] / "report.html").is_file()
    assert not (arms[0] / "gradloc" / "events.jsonl").exists()
