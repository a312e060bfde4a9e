# SPDX-License-Identifier: Apache-2.0
"""Files as lines: packed, coded, cut, large; and what is read of ten thousand steps in how much time and memory."""

import resource
import subprocess
import sys
import time

import pytest

from gradloc.report.logs.source import Source
from tests.report.builder import REPO


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_lines_in_any_coding(tmp_path, coding, end):
    (tmp_path / "a.log").write_bytes(end.join(["step \u00e9", "two", "three 3", ""]).encode(coding))
    assert [line.lstrip("\ufeff") for line in Source(tmp_path / "a.log").lines()] == ["step \u00e9", "two", "three 3"]


def test_standard_input_is_read(tmp_path, shown, monkeypatch):
    log = tmp_path / "a.log"
    log.write_text("".join(f"step:{step} - actor/grad_norm:{900.0 if step == 20 else 1.0}\n" for step in range(1, 31)))
    with log.open() as stream:
        monkeypatch.setattr("gradloc.report.logs.formats.stdin", stream)
        assert "Step 20: gradient norm 900, 900 times normal (1)." in shown("-")


@pytest.mark.full
def test_ten_thousand_steps_of_fifty_metrics_take_three_seconds_and_300_mb(tmp_path):
    names = ["actor/grad_norm", "critic/score/mean", "actor/entropy", *(f"perf/m{at}" for at in range(47))]
    row = " - ".join(f"{name}:{0.5 + at / 997}" for at, name in enumerate(names))
    (tmp_path / "a.log").write_text("".join(f"(T pid=1) step:{step} - {row}{step % 10}\n" for step in range(10_000)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Not ru_maxrss, in which a process that was started by another begins with that one's.
    show = "import sys; from gradloc.report.cli import main; main(sys.argv[1:]); "
    show += "print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    command = [sys.executable, "-c", show, str(tmp_path / "a.log")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "steps 0 to 9,999, 50 metrics" in done.stdout
    (peak_kb,) = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    assert after.ru_utime - before.ru_utime < 3.0 * max(1.0, _slowness())
    assert peak_kb < 300e3


def _slowness() -> float:
    """How many times longer than on an idle core a loop takes now."""
    started = time.process_time()
    for _ in range(5_000_000):
        pass
    return (time.process_time() - started) / 0.15
