# SPDX-License-Identifier: Apache-2.0
"""The whole way on the real trainer, in minutes: `pytest -m slow tests/analysis/quartiles/test_demo.py`."""

import json

import pytest

from gradloc.report.cli import main
from tests.analysis.test_demo import run
from tests.world.events import validate

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
FEWER = ("demo.steps=3", "trainer.quartile_analysis_every=2")


def test_the_demo_is_analysed_and_trains_as_if_it_were_not(tmp_path, patched_tree, capsys):
    few = "trainer.quartile_analysis_num_tokens=8"
    folder, on = run(tmp_path, patched_tree, "on", "quartiles-demo", *FEWER, few)
    off_key = "trainer.quartile_analysis_mode=False"
    _, off = run(tmp_path, patched_tree, "off", "quartiles-demo", *FEWER, off_key)
    for step in range(1, 4):
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
            assert on[step][name] == off[step][name]
    for step in (1, 3):
        path = folder / "gradloc" / "quartile_analysis" / f"step_{step}.json"
        record = json.loads(path.read_text())
        validate("quartile_analysis", record)
        assert record["closure"] < 1e-5
        assert on[step]["quartile_analysis/closure"] == record["closure"]
    assert main(["quartiles", str(folder), "--output-dir", str(tmp_path / "figures")]) == 0
    assert len(list((tmp_path / "figures").iterdir())) == 2
    assert "Step 3:" in capsys.readouterr().out
