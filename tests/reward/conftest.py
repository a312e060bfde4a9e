# SPDX-License-Identifier: Apache-2.0
"""The reward of the patched tree, and pools that end with their test."""

import importlib
import sys

import pytest


@pytest.fixture(scope="session")
def reward_score(patched_tree):
    """The package ``verl.utils.reward_score`` of the patched tree."""
    sys.path.insert(0, str(patched_tree))
    package = importlib.import_module("verl.utils.reward_score")
    assert package.__file__.startswith(str(patched_tree)), "another verl was imported before"
    importlib.import_module("verl.utils.reward_score.math_verify")
    yield package
    package.math_verify_pool.close()
    sys.path.remove(str(patched_tree))


@pytest.fixture(scope="session")
def pool_module(reward_score):
    return reward_score.math_verify_pool


@pytest.fixture
def make_pool(pool_module):
    """Makes pools of a given size and ends their workers after the test."""
    pools = []

    def make(num_workers):
        pools.append(pool_module.Pool(num_workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()
