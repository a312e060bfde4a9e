# SPDX-License-Identifier: Apache-2.0
"""Every tracker that installs here is told by its real client, and what it was told is read back from its files."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gradloc.notify.trackers import SENDERS

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
VERDICT = "One token made the step"
TOKEN = '" is"'


def contents(folder: Path) -> bytes:
    """All that lies in a folder, one file after the other; archives opened."""
    found = b""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                found += b"".join(archive.read(name) for name in archive.namelist())
        elif path.is_file():
            found += path.read_bytes()
    return found


@pytest.fixture
def tell_to(base_tree, tmp_path):
    """``tell_to(name, **variables)``: tells an event of each model; returns the folder in which the client stood."""

    def tell(name: str, module: str | None = None, models: tuple[str, ...] = ("actor",), **variables: str) -> Path:
        if module is not None and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -r requirements/trackers.txt")
        here = tmp_path / "here"
        here.mkdir()
        command = [sys.executable, str(ROOT / "tests/notify/tell_to.py"), name]
        command += [str(base_tree / "verl/utils/tracking.py"), str(tmp_path / "events"), *models]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(here), **variables}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "gradloc: telling" not in done.stderr and " failed (" not in done.stderr, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert json.loads(line.removeprefix("RESULT ")) == {"same_random_numbers": True}
        return here

    return tell


def test_tensorboard(tell_to):
    here = tell_to("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in here.rglob("events.out.*")}
    board = EventAccumulator(str(folder)).Reload()
    (tag,) = [tag for tag in board.Tags()["tensors"] if tag.startswith("gradloc/verdict")]
    (entry,) = board.Tensors(tag)
    assert entry.step == 5
    assert entry.tensor_proto.string_val[0].decode().startswith(VERDICT)
    assert board.Tags()["scalars"] == ["gradloc/spikes"], "the run's own numbers are in the same log"


def test_file(tell_to):
    here = tell_to("file", VERL_FILE_LOGGER_PATH="log.jsonl")
    told, numbers = (json.loads(line) for line in (here / "log.jsonl").read_text().splitlines())
    assert told["step"] == 5 and told["data"]["gradloc/verdict"][0].startswith(VERDICT)
    assert told["data"]["gradloc/culprits"][0]["token"] == TOKEN
    assert numbers == {"step": 5, "data": {"gradloc/spikes": 1}}


def test_wandb(tell_to):
    here = tell_to("wandb", "wandb", ("actor", "critic"), WANDB_MODE="offline", WANDB_SILENT="true")
    (html,) = here.rglob("gradloc/verdict_*.html")
    (critics,) = here.rglob("gradloc/critic_verdict_*.html")  # both stay: W&B joins what a step logs
    assert VERDICT in html.read_text() and VERDICT in critics.read_text()
    (table,) = here.rglob("gradloc/culprits_*.table.json")
    assert json.loads(table.read_text())["data"][0][2] == TOKEN
    (log,) = here.rglob("*.wandb")
    assert b"gradloc-event" in log.read_bytes() and b"sequences.json" in contents(here)
    assert b"One token made the step-5 spike: " in log.read_bytes(), "the alert"


def test_mlflow(tell_to):
    here = tell_to("mlflow", "mlflow", MLFLOW_TRACKING_URI="sqlite:///runs.db")
    (verdict,) = here.rglob("gradloc/*/verdict.txt")
    assert verdict.read_text().startswith(VERDICT)
    assert json.loads((verdict.parent / "event.json").read_text())["culprits"]
    (table,) = here.rglob("gradloc/culprits.json")
    assert TOKEN in json.loads(table.read_text())["data"][0]


def test_trackio(tell_to, tmp_path):
    here = tell_to("trackio", "trackio", TRACKIO_DIR=str(tmp_path / "here" / "trackio"))
    (path,) = here.rglob("tests*.db")
    with sqlite3.connect(path) as database:
        [(step, logged)] = database.execute("SELECT step, metrics FROM metrics")
        [(alert,)] = database.execute("SELECT text FROM alerts")
    told = json.loads(logged)
    assert step == 5 and VERDICT in told["gradloc/verdict"]["_value"]
    assert told["gradloc/culprits"]["_type"] == "trackio.table"
    assert alert.startswith("One token made the step-5 spike: ")


def test_swanlab(tell_to):
    here = tell_to("swanlab", "swanlab", SWANLAB_MODE="offline")
    found = contents(here)
    assert b"gradloc/verdict" in found and VERDICT.encode() in found
    assert b"gradloc/culprits" in found


def test_clearml(tell_to, tmp_path):
    here = tell_to("clearml", "clearml", CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path / "here" / "cache"))
    found = contents(here)
    assert VERDICT.encode() in found
    assert b'"culprits"' in found


def test_the_page_lists_every_tracker():
    page = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
    for name in [*SENDERS, "console", "mlflow", "rl_insight"]:
        assert f"| `{name}`" in page
