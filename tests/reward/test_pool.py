# SPDX-License-Identifier: Apache-2.0
"""A hanging or crashing answer costs itself and no other; workers are kept.

pytest tests/reward/test_pool.py -s    (-s shows the milliseconds per call)
"""

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.rewards import math_verify
from tests.reward.answers import HANGING, boxed, boxed_gold, pids


def test_a_hanging_answer_times_out_while_twenty_others_are_scored_right_and_in_time(make_pool, pool_module):
    pool = make_pool(2)
    # Warm, so that the times below are those of the scoring.
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda n: pool.score(boxed_gold(n), boxed(n), 10), [1, 2]))

    def score_other(n):
        answer = n if n % 2 else n + 1
        score = pool.score(boxed_gold(n), boxed(answer), 10)
        return score, time.monotonic()

    with ThreadPoolExecutor(21) as threads:
        begin = time.monotonic()
        hanging = threads.submit(pool.score, boxed_gold(1), HANGING, 3)
        others = list(threads.map(score_other, range(20)))
        with pytest.raises(pool_module.ScoringTimeout, match="no answer within 3 s"):
            hanging.result()
        waited_s = time.monotonic() - begin
    assert [score for score, _ in others] == [float(n % 2) for n in range(20)]
    assert max(end for _, end in others) - begin < 2.5, "the others waited for the hanging one"
    assert 3 <= waited_s < 5
    assert pool.counts == {"scored": 22, "timeouts": 1, "errors": 0}


def test_an_item_that_crashes_fails_alone_and_its_worker_is_replaced(make_pool, pool_module):
    pool = make_pool(1)
    pool.score(boxed_gold(1), boxed(1), 10)
    (pid,) = pids(pool)
    threading.Timer(0.5, os.kill, (pid, signal.SIGSEGV)).start()
    with pytest.raises(pool_module.ScoringError, match="the worker died, exit code -11") as failed:
        pool.score(boxed_gold(1), HANGING, 10)
    assert not isinstance(failed.value, pool_module.ScoringTimeout) and not pids(pool)
    assert pool.score(boxed_gold(1), boxed(1), 10) == 1.0
    assert len(pids(pool)) == 1 and pids(pool) != {pid} and pool.counts == {"scored": 2, "timeouts": 0, "errors": 1}


def test_a_worker_that_dies_between_items_costs_no_item(make_pool):
    pool = make_pool(1)
    pool.score(boxed_gold(1), boxed(1), 10)
    (worker,) = pool.workers
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert pool.score(boxed_gold(1), boxed(1), 10) == 1.0
    assert pool.counts["errors"] == 0


def test_one_worker_serves_hundreds_of_calls_in_milliseconds_each(make_pool):
    pool = make_pool(4)
    pool.score(boxed_gold(0), boxed(0), 10)
    before, begin = pids(pool), time.monotonic()
    for n in range(300):
        assert pool.score(boxed_gold(n), boxed(n), 10) == 1.0
    call_ms = (time.monotonic() - begin) / 300 * 1e3
    print(f"{call_ms:.2f} ms per call")
    assert pids(pool) == before and len(before) == 1
    assert call_ms < 50, "a start of a process takes 400 ms: is there one per call?"


def test_compute_score_gives_a_timeout_its_score_counts_it_and_says_so(pool_module, caplog):
    pool_module.close()
    compute = math_verify.compute_score
    with caplog.at_level(logging.WARNING):
        assert compute(HANGING, "1", timeout_s=0.5) == 0.0
        assert compute(HANGING, "1", -1.0, timeout_s=0.5) == -1.0
        assert compute(HANGING, "1", timeout_s=0.4) == 0.0
    assert pool_module.counts() == {"scored": 0, "timeouts": 3, "errors": 0}
    messages = [record.getMessage() for record in caplog.records]
    # The third is not logged: a bad data set must not flood the log.
    assert [message.split(";")[0] for message in messages] == [
        f"math_verify: no answer within 0.5 s (timeouts so far: {n} of {n} items)" for n in (1, 2)
    ]


def test_without_the_package_the_error_names_the_command_that_installs_it(make_pool, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    pool = make_pool(1)
    with pytest.raises(ImportError) as caught:
        pool.score(boxed_gold(1), boxed(1), 10)
    assert str(caught.value) == (
        "lab.rewards.math_verify needs the package math-verify, which could not be loaded "
        "(ModuleNotFoundError: No module named 'math_verify'): "
        "run `pip install math-verify==0.9.0 antlr4-python3-runtime==4.9.3`."
    )
    assert not pids(pool)
