# SPDX-License-Identifier: Apache-2.0
"""Which link of a step broke, in verl 0.9's engine on two ranks; looking changes nothing."""

import pytest

from benchmarks.links import FAULTS as TRUTH
from tests.adapters.verl09.harness import HEALTHY
from tests.adapters.verl09.test_localization import ACTOR, half
from tests.world.events import read_events

ON = ["+gradloc=on", f"{ACTOR}.optim.weight_decay=0.01"]
FAULTS = ("batch", "weight_decay", "second_moments", "norm_scale")
LAYOUTS = {"fsdp2": [], "fsdp1": [f"{ACTOR}.strategy=fsdp"], "bf16": half("bfloat16", "bf16")}


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        *(("fsdp2", fault) for fault in FAULTS),
        ("fsdp1", "weight_decay"),
        *(
            pytest.param(layout, fault, marks=pytest.mark.slow)
            for layout, fault in (("fsdp1", "batch"), ("bf16", "weight_decay"), ("bf16", "norm_scale"))
        ),
    ],
)
def test_the_link_is_named_and_the_run_stays_what_it_was(call, layout, fault, tmp_path):
    given = [*LAYOUTS[layout], f"{ACTOR}.optim.weight_decay=0.01"]
    stock = call("train_with_fault", given, fault=fault, stock=True)
    watched = call("train_with_fault", [*ON, *given, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], fault=fault)
    assert [one["weights"] for one in stock] == [one["weights"] for one in watched]
    assert (tmp_path / "events.jsonl").exists(), stock[0]["norms"][-4:]
    event = next(each for each in read_events(tmp_path) if each["step"]["global_step"] > HEALTHY)
    found = event["fault"]
    assert found["at"] == TRUTH[fault], (found, stock[0]["norms"])
    assert not event["culprits"] or fault == "batch"
    if fault == "norm_scale" and layout == "fsdp2":
        assert found["parameters"] == ["model.norm.weight"]


def test_a_batch_is_named_that_is_loud_only_since_an_update_on_its_own_rollouts(call, tmp_path):
    call("train_until_ratios_run_away", [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    *_, event = read_events(tmp_path)
    found = event["fault"]
    assert (event["step"]["global_step"], event["step"]["epoch"]) == (HEALTHY + 1, 1)
    assert found["at"] == "batch" and "only since the last update" in found["reason"], found
    assert event["culprits"]
    assert found["evidence"]["loudest_norm_without_update"] < event["trigger"]["threshold"]
