# SPDX-License-Identifier: Apache-2.0
"""What conftest.py says about processes is what pytest-xdist does."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_the_tests_of_a_group_are_kept_together(request):
    assert request.node.nodeid.endswith("@tests/house/test_processes.py"), "this pytest-xdist does not see the groups"
