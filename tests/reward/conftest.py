# SPDX-License-Identifier: Apache-2.0
"""Pools that end with their test."""

import pytest

from lab.rewards import math_pool


@pytest.fixture(scope="session")
def pool_module():
    yield math_pool
    math_pool.close()


@pytest.fixture
def make_pool(pool_module):
    """Makes pools of a given size and ends their workers after the test."""
    pools = []

    def make(num_workers):
        pools.append(pool_module.Pool(num_workers))
        return pools[-1]

    yield make
    for worker in [worker for pool in pools for worker in pool.workers if worker]:
        worker.kill()
