# SPDX-License-Identifier: Apache-2.0
"""How many files of ours somebody has to read who follows a spike on verl 0.9, counted by a trace."""

import re
from pathlib import Path

from .test_localization import ACTOR, ON, PLANT

CONTRIBUTING = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"


def test_a_spike_passes_through_fifteen_files_which_are_listed(engine_world, model_dir, tmp_path):
    overrides = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"]
    way = "tests.adapters.verl09.harness.way_of_a_spike"
    found, *_ = engine_world.run(way, overrides=overrides, model_dir=str(model_dir), plant=PLANT)
    told = CONTRIBUTING.read_text().partition("## The way of a spike")[2].partition("\n## ")[0]
    assert re.findall(r"^(\S+\.py) ", told, flags=re.M) == found
    assert len(found) <= 15
