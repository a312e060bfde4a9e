# SPDX-License-Identifier: Apache-2.0
"""The reward works in the processes that verl scores in, and leaves none behind.

pytest tests/reward/test_processes.py
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.rewards import math_verify
from tests.reward.answers import HANGING, boxed, pids

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.full

# Loads the pool by its path: it needs nothing of verl, and `import verl` takes seconds of torch.
POOL = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("math_pool", sys.argv[1])
pool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pool)

def start(answer, limit_s):
    threading.Thread(target=pool.score, args=("$1$", answer, limit_s), daemon=True).start()

def print_workers(count):
    workers = ()
    while len(workers) < count:
        time.sleep(0.05)
        workers = [*filter(None, pool._pool.workers)] if pool._pool else ()
    print(*(worker._process.pid for worker in workers), flush=True)

HANGING = sys.argv[2]
"""
ACTOR = """
import asyncio, json, ray, sys
from lab.rewards import math_pool
from lab.rewards.math_verify import compute_score, score

HANGING = sys.argv[2]

@ray.remote(num_cpus=0)
class RewardLoop:
    async def score(self):
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(None, lambda: compute_score(HANGING, "1", -1.0, timeout_s=2))]
        for n in range(20):
            args = ("math_verify", "so $" + str(n) + "$", str(n % 5))
            calls.append(loop.run_in_executor(None, lambda args=args: score(*args)))
        return await asyncio.gather(*calls), math_pool.counts()

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
print(json.dumps(ray.get(RewardLoop.remote().score.remote())), flush=True)
ray.shutdown()
"""


@pytest.fixture
def start():
    """Starts Python code as a process of its own."""
    pool_file = ROOT / "lab/rewards/math_pool.py"
    processes = []

    def start(code):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(pool_file), HANGING],
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def ends_within(pid: int, limit_s: float) -> bool:
    """Whether the process is gone by then; a zombie that its new parent has not reaped counts as gone."""
    deadline = time.monotonic() + limit_s
    try:
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return True


def test_a_process_forked_from_one_with_a_pool_scores_with_workers_of_its_own(pool_module):
    compute = math_verify.compute_score
    assert compute(boxed(1), "1") == 1.0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def score_in_child():
        scores = [compute(HANGING, "1", -1, 0.5)] + [compute(boxed(n), "1") for n in (1, 2)]
        theirs.send((scores, pool_module.counts(), list(pids(pool_module._pool))))

    process = context.Process(target=score_in_child, daemon=True)
    process.start()
    assert ours.poll(30)
    scores, counts, workers = ours.recv()
    assert scores == [-1, 1.0, 0.0] and counts == {"scored": 2, "timeouts": 1, "errors": 0}
    process.join(10)
    assert process.exitcode == 0
    assert len(workers) == 1 and ends_within(workers[0], 1)
    assert compute(boxed(1), "1") == 1.0


def test_a_script_that_ends_takes_its_idle_and_busy_workers_with_it(start):
    code = """
start(HANGING, 60)
start(HANGING, 60)
print(pool.score("$1$", "$1$"))
print_workers(3)
"""
    process = start(POOL + code)
    assert process.stdout.readline() == "1.0\n"
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert process.wait(30) == 0
    assert len(workers) == 3
    assert all(ends_within(pid, 1) for pid in workers)


def test_workers_outlive_a_killed_parent_by_no_more_than_their_items_limit(start):
    code = """
start(HANGING, 3)
start("$1$", 3)
print_workers(2)
time.sleep(60)
"""
    process = start(POOL + code)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2 and not all(ends_within(pid, 0) for pid in workers)
    process.send_signal(signal.SIGKILL)
    assert all(ends_within(pid, 3 + 1 + 1) for pid in workers)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_asyncio_loop_in_a_ray_actor_scores_twenty_answers_around_a_hanging_one(start):
    process = start(ACTOR)
    output, _ = process.communicate(timeout=60)
    scores, counts = json.loads(output.splitlines()[-1])
    assert scores == [-1.0] + [float(n < 5) for n in range(20)]
    assert counts == {"scored": 20, "timeouts": 1, "errors": 0}
