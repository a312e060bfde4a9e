# SPDX-License-Identifier: Apache-2.0
"""An update of verl 0.9's engine asks no more of the device than one of verl 0.7's actor may."""

import pytest

from tests.benchmarks.test_counts import check


@pytest.mark.slow
def test_an_update_stays_within_the_limits(world, tmp_path):
    check({"unpatched": world, "on": world}, tmp_path)
