# SPDX-License-Identifier: Apache-2.0
"""verl's own peak of memory stays what it was, though each step resets what its device tells."""

import pytest

from gradloc.loop.messages import RankReport


@pytest.mark.parametrize("kind", ["allocated", "reserved"])
@pytest.mark.parametrize("role", ["", "actor/", "critic/"])
@pytest.mark.parametrize(("told", "restored"), [(1.0, 3.0), ([1.0, 4.0], [3.0, 4.0])])
def test_the_process_own_peak_is_told_where_the_device_s_was_reset(told, restored, role, kind):
    from gradloc.adapters.verl_common.trainer import _restore_peak  # the default tests, which skip this, collect it

    name = f"{role}perf/max_memory_{kind}_gb"
    metrics = {name: told, "actor/lr": 0.1}
    _restore_peak(metrics, [RankReport(0, peak_bytes=(3 * 2**30,) * 2), RankReport(1, peak_bytes=(2**30,) * 2)])
    assert metrics == {name: restored, "actor/lr": 0.1}
    without = {"actor/lr": 0.1}
    _restore_peak(without, [RankReport(0, peak_bytes=(2**30,) * 2)])
    assert without == {"actor/lr": 0.1}, "nothing is told where verl tells nothing"
