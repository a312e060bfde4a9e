# SPDX-License-Identifier: Apache-2.0
"""The example of docs/trl.md runs as it is printed, with a tiny model on a CPU."""

import re

from tests.adapters.trl import harness
from tests.world import REPO

PAGE = (REPO / "docs" / "trl.md").read_text(encoding="utf-8")


def test_the_example_trains(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (hint,) = re.findall(r"logging_steps=1\), +# without a GPU also: (.*)", code)
    model = harness.save_model(str(tmp_path / "model"))
    code = code.replace("path/to/a/model", model).replace("logging_steps=1)", f"logging_steps=1, {hint}, max_steps=2)")
    monkeypatch.chdir(tmp_path)
    made: dict = {}
    exec(code, made)
    assert made["trainer"].state.global_step == 2
    assert "gradloc/spikes" in made["trainer"].state.log_history[0]
    assert f"gradloc: on (observe); events go to {tmp_path}/out/gradloc" in capsys.readouterr().out
