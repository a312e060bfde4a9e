# SPDX-License-Identifier: Apache-2.0
"""The check that a user with a cluster runs measures right, and prints what it measured."""

import re

import pytest

from .conftest import HERE
from .layouts import LAYOUTS, in_layouts


@in_layouts("experts, EP 2", "TP 2 x PP 2", "CP 2, by tokens", "optimizer on the CPU, TP 2, bfloat16")
def test_it_says_that_all_adds_up_and_that_nothing_is_changed(world, layout, tmp_path):
    of, folder = LAYOUTS[layout], str(tmp_path / "model")
    world.run(f"{HERE}.harness.save_model", folder=folder, kind=of.experts)
    said, *_ = world.run(f"{HERE}.harness.check", overrides=of.overrides, model_dir=folder)
    print(said)
    assert float(re.search(r"within (\S+)", said)[1]) < 2e-6
    assert "1 named, at (rank, positions) [(0, (5,))]: explained" in said
    assert float(re.search(r"closure: (\S+)", said)[1]) == pytest.approx(1, abs=0.03)
    assert said.count(": yes") == 4 and ": NO" not in said
