# SPDX-License-Identifier: Apache-2.0
"""The example of docs/trl.md runs as it is printed, with a tiny model on a CPU."""

import importlib
import inspect
import re

import trl

from tests.adapters.trl import harness
from tests.world import REPO

PAGE, OBSERVE = ((REPO / "docs" / name).read_text(encoding="utf-8") for name in ("trl.md", "observe.md"))


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


def test_how_long_peers_wait_is_trls_own_setting(tmp_path):
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert f"TRL's `ddp_timeout` ({args.ddp_timeout} s)" in OBSERVE


def test_trl_s_command_takes_no_other_trainer():
    assert "The `trl grpo` command cannot take a custom trainer." in PAGE
    source = inspect.getsource(importlib.import_module("trl.scripts.grpo"))
    assert re.findall(r"\btrainer = (\w+)\(", source) == ["GRPOTrainer"] and "trainer_cls" not in source
