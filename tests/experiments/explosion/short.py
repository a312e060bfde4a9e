# SPDX-License-Identifier: Apache-2.0
"""Two arms of the explosion on a real trainer, with the plants early, and what has to come of them."""

import json
from pathlib import Path

import pytest

from tests.experiments.real import run_to_the_end


def explode(run_dir: Path, *more: str, **variables: str) -> None:
    """Run them, and check norms, event, record and summary.

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
    norms = {}
    for arm in ("healthy", "unprotected"):
        lines = (run_dir / arm / "metrics.jsonl").read_text().splitlines()
        norms[arm] = [
            d["actor/grad_norm_max"] for d in (json.loads(line)["data"] for line in lines) if "actor/grad_norm_max" in d
        ]
        assert json.loads((run_dir / arm / "knobs.json").read_text())["runaway_penalty"] == 0.25
    # The same up to the plant, to the last digit; a warning; the catastrophe.
    assert norms["healthy"][:4] == norms["unprotected"][:4]
    warning, spike = norms["unprotected"][4:]
    assert spike > 3 * warning > 6 * max(norms["healthy"])
    events = (run_dir / "unprotected" / "gradloc" / "events.jsonl").read_text().splitlines()
    event = json.loads(events[-1])
    (culprit,) = event["culprits"]
    planted = [json.loads(line) for line in (run_dir / "unprotected" / "planted.jsonl").open()]
    assert event["step"]["global_step"] == planted[1]["step"] == 6
    assert culprit["positions"] == planted[1]["positions"] and planted[1]["length"] == 200
    assert culprit["token_ids"] == planted[1]["token_ids"]
    assert culprit["advantage"] == pytest.approx(0.8)
    assert 5e4 < culprit["ratios"]["current_over_old"] < 1e5
    assert culprit["cause"]["label"] == "token_mismatch"
    assert "as planted" in printed and (run_dir / "summary.png").is_file()
    assert (run_dir / "unprotected" / "report.html").is_file()
    assert not (run_dir / "healthy" / "gradloc" / "events.jsonl").exists()
