# SPDX-License-Identifier: Apache-2.0
"""Running the trainer's command: its log, what is shown of it, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from lab.experiments import launch
from tests.experiments.conftest import REPO

STEP = (
    "\x1b[36m(TaskRunner pid=6337)\x1b[0m step:3 - global_seqlen/mean:1.0 - "
    "actor/grad_norm:np.float64(118.0) - critic/score/mean:0.606 - timing_s/step:0.9"
)


def python(code):
    return [sys.executable, "-u", "-c", textwrap.dedent(code)]


@pytest.mark.parametrize("value", ["tensor(3.)", "None", "", "1.2.3", "nan"])
def test_a_value_that_is_no_number_does_no_harm(value):
    assert launch.parse_step(f"step:1 - a:{value} - b:2")[1]["b"] == 2.0


def test_a_brief_run_shows_steps_and_milestones_only():
    brief = launch.Brief()
    assert brief.line(STEP) == "step  3  grad norm 118  score 0.606  seconds 0.9"
    assert brief.line(STEP + " - gradloc/events:1").endswith("SPIKE: searched")
    assert brief.line(STEP + " - gradloc/spikes:1 - gradloc/events:0").endswith("not searched")
    assert brief.line("(raylet) Started a local Ray instance.") == "Ray has started"
    assert brief.line("some warning") is brief.line("step:2 - gradloc/verdict:one token") is None


def test_a_step_says_how_long_the_others_take():
    brief = launch.Brief()
    assert "4 steps to go" in brief.line("(TaskRunner) Total training steps: 4")
    seconds = [90.0, 30.0, 40.0, 20.0]
    said = [brief.line(f"step:{i} - timing_s/step:{s}") for i, s in enumerate(seconds, start=1)]
    # The first step starts things up: the median lets it go.
    assert [line.partition("about ")[2] for line in said] == ["4:30 to go", "2:00 to go", "0:40 to go", ""]


def test_everything_goes_to_the_log_and_the_exit_code_comes_back(tmp_path, capfd):
    command = python("import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(3)")
    assert launch.run(command, tmp_path / "log", is_brief=True) == 3
    log = (tmp_path / "log").read_text()
    assert "to out" in log and "to err" in log
    shown = capfd.readouterr()
    assert "to out" not in shown.out
    assert "exit code 3" in shown.err and "to err" in shown.err and str(tmp_path) in shown.err


def test_a_verbose_run_shows_everything_and_what_is_not_text_does_no_harm(tmp_path, capfd):
    command = python("import sys; sys.stdout.buffer.write(b'hello' + bytes([255, 10]))")
    assert launch.run(command, tmp_path / "log", is_brief=False) == 0
    assert capfd.readouterr().out.startswith("hello")


@pytest.mark.parametrize("failures, code", [(2, 0), (3, 1)])
def test_where_ray_does_not_start_in_its_time_it_is_tried_again(tmp_path, capfd, failures, code):
    count = tmp_path / "count"
    command = python(f"""
        import sys
        from pathlib import Path
        count = Path({str(count)!r})
        number = len(count.read_text()) + 1 if count.exists() else 1
        count.write_text("x" * number)
        sys.exit("Exception: {launch.LATE}. Some raylet failed." if number <= {failures} else 0)
    """)
    assert launch.run(command, tmp_path / "log", is_brief=True) == code
    assert len(count.read_text()) == 3
    shown = capfd.readouterr()
    assert shown.out.count("Once more") == 2 and ("The trainer failed" in shown.err) == (code == 1)


def test_what_outlives_the_trainer_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    pid_file = tmp_path / "pid"
    # As Ray's workers do: a process group of its own, the same session, our end of the pipe.
    command = python(f"""
        import subprocess, sys
        code = "import os, time; os.setpgid(0, 0); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        open({str(pid_file)!r}, "w").write(str(child.pid))
    """)
    started = time.monotonic()
    assert launch.run(command, tmp_path / "log", is_brief=True) == 0
    assert time.monotonic() - started < 50
    assert has_ended(int(pid_file.read_text()))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_an_interrupt_ends_the_trainer_and_its_children(tmp_path, number, code):
    pid_file = tmp_path / "pid"
    trainer = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        print("ready")
        time.sleep(60)
    """
    launcher = f"""
        import sys
        from pathlib import Path
        from lab.experiments import launch
        launch.GRACE_S = 0.5
        command = [sys.executable, "-u", "-c", {textwrap.dedent(trainer)!r}]
        sys.exit(launch.run(command, Path({str(tmp_path / "log")!r}), is_brief=False))
    """
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(python(launcher), env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Stopped by" in said
    assert has_ended(int(pid_file.read_text()))


def has_ended(pid):
    """Whether the process is gone, now or within seconds: on a busy machine a kill takes its time."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_an_interpreter_in_a_folder_with_spaces_gets_a_path_without(tmp_path):
    folder = tmp_path / "a folder"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    given = str(folder / "bin" / "python")
    with launch.plain_path(given) as plain:
        assert " " not in plain
        code = "import sys; print(sys.prefix != sys.base_prefix)"
        assert subprocess.check_output([plain, "-c", code], text=True) == "True\n"
    assert not os.path.exists(plain)
    with launch.plain_path("/usr/bin/python3.11") as ordinary:
        assert ordinary == "/usr/bin/python3.11"
