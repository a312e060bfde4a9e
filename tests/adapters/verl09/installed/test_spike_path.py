# SPDX-License-Identifier: Apache-2.0
"""The files that a spike passes through on verl 0.9, found by a trace, are those that CONTRIBUTING lists."""

import re
import sys
from pathlib import Path
from typing import Any

import gradloc
from tests.adapters.verl09 import harness
from tests.adapters.verl09.test_localization import ACTOR, ON, PLANT

CONTRIBUTING = Path(__file__).resolve().parents[4] / "CONTRIBUTING.md"
HANDOVERS = ("before_step", "localize", "certify", "raw_event", "report", "complete_event", "append")
"""Functions that hand a spike on, from the norm to the written event."""
LIBRARIES = ("core/", "trigger/", "explain/")
"""Packages that only compute."""


def files_of_a_spike(overrides: list[str], model_dir: str, plant: tuple[int, int, float]) -> list[str]:
    """Return the files on the stack where a spike is handed on, without libraries.

    Args:
        overrides: of verl's config.
        model_dir: written by `harness.save_model`.
        plant: row, position and advantage of a token.
    """
    trainer = harness.make_trainer(overrides, model_dir)
    trainer.update(harness.make_batch(seed=1))
    batch = harness.make_batch(seed=2)
    batch.batch["advantages"][plant[0], plant[1]] = plant[2]
    root, seen = f"{Path(gradloc.__file__).parent}/", {}

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name not in HANDOVERS or not frame.f_code.co_filename.startswith(root):
            return
        stack = []
        while frame is not None:
            stack.append(frame.f_code.co_filename)
            frame = frame.f_back
        seen.update(dict.fromkeys(file.removeprefix(root) for file in reversed(stack) if file.startswith(root)))

    sys.setprofile(note)
    try:
        trainer.update(batch)
    finally:
        sys.setprofile(None)
    return [file for file in seen if not file.startswith(LIBRARIES)]


def test_a_spike_passes_through_fifteen_files_of_ours_at_most_which_are_listed(world, model_dir, tmp_path):
    overrides = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"]
    scenario = f"{__name__}.{files_of_a_spike.__name__}"
    found, *_ = world.run(scenario, overrides=overrides, model_dir=str(model_dir), plant=PLANT)
    listed = CONTRIBUTING.read_text().partition("## The path of a spike")[2].partition("A setting's path")[0]
    assert re.findall(r"^(\S+\.py) ", listed, flags=re.M) == found
    assert len(found) <= 15
