# SPDX-License-Identifier: Apache-2.0
"""verl's own peak of memory stays what it was, though each step resets what its device tells."""

from types import SimpleNamespace

import pytest

from gradloc.loop.messages import Policy, RankReport


def updated(told, *peaks):
    """Return the metrics of an update whose workers' own are these, and whose processes had these peaks, in GiB."""
    from gradloc.adapters.verl_common.trainer import TrainerFeatures  # the default tests, which skip this, collect it

    features, update = TrainerFeatures(), SimpleNamespace(dp_size=len(peaks), workers=SimpleNamespace(report=None))
    reports = {f"gradloc_report_{n}": RankReport(n, peak_bytes=(peak * 2**30,) * 2) for n, peak in enumerate(peaks)}
    update.group = SimpleNamespace(execute_with_func_generator=lambda ask: SimpleNamespace(meta_info=reports))
    update.view, update.run = lambda: SimpleNamespace(num_tokens=None), lambda policy: {**told}
    update.trainer = SimpleNamespace(global_steps=1)
    features.critic = SimpleNamespace(
        before_batch=lambda *_: Policy(1, "fixed"),
        settings=SimpleNamespace(search=SimpleNamespace(max_cures=0)),
        after_update=lambda *_: {},
        step_metrics=(),
    )
    return features.update_critic(update)


@pytest.mark.parametrize("kind", ["allocated", "reserved"])
@pytest.mark.parametrize("role", ["", "actor/", "critic/"])
@pytest.mark.parametrize(("told", "restored"), [(1.0, 3.0), ([1.0, 4.0], [3.0, 4.0])])
def test_the_process_own_peak_is_told_where_the_device_s_was_reset(told, restored, role, kind):
    name = f"{role}perf/max_memory_{kind}_gb"
    assert updated({name: told, "actor/lr": 0.1}, 3, 1) == {name: restored, "actor/lr": 0.1}
    assert updated({"actor/lr": 0.1}, 1) == {"actor/lr": 0.1}, "nothing is told where verl tells nothing"
