# SPDX-License-Identifier: Apache-2.0
"""The callback between a Trainer's calls, and `gradloc run` up to its command; tests/recipes has real trainers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradloc.adapters.hf import run
from gradloc.adapters.hf.callback import TrainerCallback

STARTUP = Path(run.__file__).parent / "startup"


def test_a_line_of_the_log_has_the_spikes_since_the_last_and_events_the_trainers_steps(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    optimizer, state = torch.optim.SGD(model.parameters(), lr=1e-3), SimpleNamespace(global_step=6)
    callback, args = TrainerCallback(trigger={"tau": 50.0}), SimpleNamespace(output_dir=str(tmp_path))
    callback.on_train_begin(args, state, None, model=model)
    lines = []
    for factor in (1.0, 1e4, 1e4, 1e4, 1.0, 1.0):
        callback.on_step_begin(args, state, None)
        ids = torch.randint(20, (2, 5))
        loss = factor * torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(args, state, None)
        state.global_step += 1
        if state.global_step % 2 == 0:
            lines.append({"loss": float(loss.detach())})
            callback.on_log(args, state, None, logs=lines[-1])
    assert [line["gradloc/spikes"] for line in lines] == [1, 2, 0]
    assert len({line["gradloc/threshold"] for line in lines}) == 1, "a fixed one"
    summary = {"train_runtime": 1.0}
    callback.on_log(args, state, None, logs=summary)
    assert list(summary) == ["train_runtime"], "no line of a step"
    events = (tmp_path / "gradloc" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"]["global_step"] for line in events] == [8, 9, 10]
    callback.on_train_end(args, state, None)
    assert not any(part._forward_hooks for part in model.modules())


def test_the_command_starts_with_its_settings_and_our_startup_first(monkeypatch):
    started = {}
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setattr(os, "execvpe", lambda name, words, environment: started.update(environment, words=words))
    run.main(["action=off", sys.executable])
    assert json.loads(started[run.SETTINGS]) == {"action": "off"}
    run.main(["action=mask", "trigger.tau=640", "folder=runs/x", sys.executable, "train.py", "lr=1"])
    assert json.loads(started[run.SETTINGS]) == {"action": "mask", "trigger": {"tau": 640}, "folder": "runs/x"}
    assert started["words"] == [sys.executable, "train.py", "lr=1"]
    assert started["PYTHONPATH"].split(os.pathsep) == [str(STARTUP), "theirs"]


@pytest.mark.parametrize(("words", "code"), [([], 2), (["-h"], 0), (["action=mask"], 2), (["no-such-command"], 2)])
def test_without_a_command_it_says_how_it_is_called(words, code, capsys):
    assert run.main(words) == code
    said = capsys.readouterr()
    assert "usage: gradloc run" in (said.err if code else said.out) or "no command no-such-command" in said.err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("action=foo", "gradloc.action.mode must be observe, mask, skip, abort or off"),
        ("triger.tau=1", "unknown setting gradloc.triger: did you mean gradloc.trigger?"),
        ("trigger.tau=x", "gradloc.trigger.tau must be"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_command_starts(setting, said, capsys, monkeypatch):
    monkeypatch.setattr(os, "execvpe", lambda *given: pytest.fail("it started"))
    assert run.main([setting, sys.executable]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hides", [True, False])
def test_python_starts_with_the_startup_file_that_ours_hides_or_with_ours_alone(tmp_path, hides):
    if hides:
        (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), str(tmp_path)])}
    command = [sys.executable, "-c", "import sys; print(type(sys.meta_path[0]).__name__)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["theirs"] * hides + ["_AtTrainer"] and not found.stderr
