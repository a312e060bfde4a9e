# SPDX-License-Identifier: Apache-2.0
"""The last update undone between two epochs; tests/fault has each link, engine_links its faults in this engine."""

import pytest

from tests.adapters.verl09.harness import HEALTHY
from tests.adapters.verl09.test_localization import ACTOR
from tests.world.events import read_events

ON = ["+gradloc=on", f"{ACTOR}.optim.weight_decay=0.01"]


def test_undone_between_epochs_a_step_has_the_norm_of_the_epoch_before(call, tmp_path):
    """Importance ratios follow the weights: the loss is verl's own at the log-probs that they then give."""
    (norms, _) = call("train_until_ratios_run_away", [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    *_, event = read_events(tmp_path)
    found, spike = event["fault"], event["trigger"]["grad_norm"]
    assert (event["step"]["global_step"], event["step"]["epoch"]) == (HEALTHY + 1, 1)
    first_epoch = 2 * norms[-1] - spike  # verl has their mean
    assert found["evidence"]["norm_without_update"] == pytest.approx(first_epoch, rel=1e-2)
    assert found["at"] == "last_update" and found["parameters"][0] == "lm_head.weight"
