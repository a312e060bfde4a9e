# SPDX-License-Identifier: Apache-2.0
"""What an update of verl 0.9's engine asks of the device, within the limits that hold for verl 0.7's actor."""

import pytest

from tests.benchmarks.test_counts import check


@pytest.mark.slow
def test_an_update_stays_within_the_limits(world, tmp_path):
    check({"unpatched": world, "on": world}, tmp_path)
