# SPDX-License-Identifier: Apache-2.0
"""The browser, and pages for it; Chromium is installed from the distribution's packages where that can be done."""

import random
import time

import pytest

from gradloc.report.cli import main
from tests.mismatch.test_files import prime_rl, shifted
from tests.report.browser.driving import shots, written
from tests.report.builder import HOSTILE, REPO, make_culprit, make_event, make_metrics, make_sequence, write_run


@pytest.fixture(scope="session")
def driver():
    if shots.missing():
        shots.install()
    problem = shots.missing()
    if problem:
        pytest.skip(f"no browser session: {problem}")
    with shots.browser() as made:
        yield made


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory):
    """Two events: hostile tokens, and a long sequence with a far culprit."""
    root = tmp_path_factory.mktemp("hostile")
    tokens = [*HOSTILE, *(f" w{i}" for i in range(3000))]
    events = [make_event(5, [make_culprit(3, token=HOSTILE[3])]), make_event(9, [make_culprit(1500)])]
    sequences = {
        events[0]["event_id"]: [make_sequence(tokens=HOSTILE)],
        events[1]["event_id"]: [make_sequence(tokens=tokens)],
    }
    return written(write_run(root, events, sequences, make_metrics(20, (5, 9))))


@pytest.fixture(scope="session")
def long_run_page(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    events = [make_event(step, trigger={"grad_norm": 60.0 + step * 37 % 101}) for step in range(1, 201)]
    return written(write_run(root, events, metrics=make_metrics(200, tuple(range(1, 201)))))


@pytest.fixture(scope="session")
def largest_page(tmp_path_factory):
    """2,000 events of 8 culprits, the worst with a sequence of 32k tokens; and the CPU seconds of its page."""
    root = tmp_path_factory.mktemp("largest")
    source = random.Random(0)
    tokens = [source.choice([" the", " so", "\n", " x", " ="]) for _ in range(32768)]
    tokens[20000:23000] = ["!"] * 3000
    events = []
    for step in range(1, 2001):
        culprits = [make_culprit(3 + 5 * index, token=f" t{step}x{index}") for index in range(8)]
        norm = 1e6 if step == 501 else 100.0 + step * 37 % 1013
        events.append(make_event(step, culprits, trigger={"grad_norm": norm}))
    sequences = {events[500]["event_id"]: [make_sequence(tokens=tokens)]}
    folder = write_run(root, events, sequences, make_metrics(2000, tuple(range(1, 2001))))
    start = time.process_time()  # whatever else the machine does
    path = written(folder)
    return path, time.process_time() - start


@pytest.fixture(scope="session")
def log_page(tmp_path_factory):
    """Of a log alone, with a spike that the run did not recover from."""
    return written(REPO / "tests/data/logs/console/ray.log", tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="session")
def collapsed_page(tmp_path_factory):
    """Of a run whose health goes from warning to danger."""
    return written(REPO / "tests/health/recordings/collapsed.jsonl", tmp_path_factory.mktemp("collapsed"))


@pytest.fixture(scope="session")
def mismatch_page(tmp_path_factory):
    """Of two columns, one of which is off by a token."""
    folder = tmp_path_factory.mktemp("mismatch")
    assert main(["mismatch", str(prime_rl(folder, shifted())), "-o", str(folder / "mismatch.html")]) == 0
    return folder / "mismatch.html"


@pytest.fixture(scope="session")
def demo_page(tmp_path_factory):
    """What the demo left behind, kept in examples/."""
    return written(REPO / "examples/demo", tmp_path_factory.mktemp("demo"))
