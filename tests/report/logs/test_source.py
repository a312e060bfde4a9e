# SPDX-License-Identifier: Apache-2.0
"""Files as lines: packed, coded, cut, large; and what is read of ten thousand steps in how much time and memory."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradloc.report.logs.source import Source
from tests.report.builder import REPO


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_lines_in_any_coding(tmp_path, coding, end):
    (tmp_path / "a.log").write_bytes(end.join(["step \u00e9", "two", "three 3", ""]).encode(coding))
    assert [line.lstrip("\ufeff") for line in Source(tmp_path / "a.log").lines()] == ["step \u00e9", "two", "three 3"]


def test_a_log_that_was_emptied_while_it_was_written_is_read(tmp_path, shown):
    rows = "".join(f"step:{step} - actor/grad_norm:{900.0 if step == 20 else 1.0}\n" for step in range(1, 31))
    (tmp_path / "a.log").write_bytes(bytes(100_000) + rows.encode())
    assert "Step 20: gradient norm 900" in shown(tmp_path / "a.log")


def test_standard_input_is_read(tmp_path, shown, monkeypatch):
    log = tmp_path / "a.log"
    log.write_text("".join(f"step:{step} - actor/grad_norm:{900.0 if step == 20 else 1.0}\n" for step in range(1, 31)))
    with log.open() as stream:
        monkeypatch.setattr("gradloc.report.logs.formats.stdin", stream)
        said = shown("-", "--metric", "actor/grad_norm")
    assert "Step 20: gradient norm 900, 900 times the normal 1." in said and "Next:" not in said, "it is read but once"


@pytest.mark.full
@pytest.mark.slow
def test_ten_thousand_steps_of_fifty_metrics_take_ten_plain_readings_and_300_mb(tmp_path):
    names = ["actor/grad_norm", "critic/score/mean", "actor/entropy", *(f"perf/m{at}" for at in range(47))]
    row = " - ".join(f"{name}:{0.5 + at / 997}" for at, name in enumerate(names))
    (tmp_path / "a.log").write_text("".join(f"(T pid=1) step:{step} - {row}{step % 10}\n" for step in range(10_000)))
    # Not ru_maxrss, in which a process that was started by another begins with that one's.
    show = "import sys; from gradloc.report.cli import main; main(sys.argv[1:]); "
    show += "print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    command = [sys.executable, "-c", show, str(tmp_path / "a.log")]

    def times() -> float:
        """How many plain readings of the file it takes, by the processor's time."""
        plain, before = _plain(tmp_path / "a.log"), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "steps 0 to 9,999, 50 metrics" in done.stdout
        (peak_kb,) = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("VmHWM"))
        assert peak_kb < 300e3
        return (after.ru_utime - before.ru_utime) / max(plain, _plain(tmp_path / "a.log"))

    assert any(times() < 10.0 for _ in range(5)), "others take a core's caches, but not each time"


def _plain(path: Path) -> float:
    """Seconds of the processor that it takes to read the numbers and no more: 0.4 beside other work."""
    started = time.process_time()
    with path.open() as lines:
        rows = [[float(pair.rpartition(":")[2]) for pair in line.split(" - ")[1:]] for line in lines]
    assert len(rows) == 10_000
    return time.process_time() - started
