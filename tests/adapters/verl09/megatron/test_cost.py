# SPDX-License-Identifier: Apache-2.0
"""The table of docs/megatron.md: the cost of a search on Megatron, and of the same search on FSDP."""

import pytest

from tests.experiments.conftest import REPO
from tests.world.events import read_events

from .conftest import InLayout

ACTOR = "actor_rollout_ref.actor"
SETTINGS = [
    f"{ACTOR}.grad_norm_threshold=640",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",  # eight micro-batches
    f"{ACTOR}.gradloc.search.max_steps=1000",  # whatever else the machine does meanwhile
]
PLANTS = [(5, 3, -1e4), (1, 2, 9e3), (11, 5, -8e3), (2, 3, 7e3), (7, 1, -9e3), (8, 4, 8e3), (13, 2, 7e3), (14, 0, 1e4)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 8])
def test_the_page_says_what_a_search_costs(single, worlds, tmp_path, number):
    given = {"plants": PLANTS[:number], "overrides": SETTINGS}
    single.run("spikes.localize_planted", dump_dir=str(tmp_path / "FSDP"), **given)
    slots = {}
    for name in ("TP 2", "PP 2"):
        slots[name], _ = InLayout(worlds(2), name).run("conformance.slots", dump_dir=str(tmp_path / name), **given)
    cost = {}
    for name in ("FSDP", "TP 2", "PP 2"):
        (event,) = read_events(str(tmp_path / name))
        assert {(culprit["row"], *culprit["positions"]) for culprit in event["culprits"]} == {
            (row, position) for row, position, _ in PLANTS[:number]
        }
        cost[name] = event["search"]["forwards"] + 2 * event["search"]["backwards"]
    assert slots["TP 2"] == cost["TP 2"] == cost["PP 2"] and slots["PP 2"] <= 2 * cost["PP 2"]
    row = f"| {number} | {cost['FSDP']} f | {cost['TP 2']} f | {slots['PP 2']} |"
    assert row in (REPO / "docs" / "megatron.md").read_text(), row
