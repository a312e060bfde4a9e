# SPDX-License-Identifier: Apache-2.0
"""Which link of a step broke, in verl 0.9's engine on two ranks; looking changes nothing."""

import pytest

from gradloc.explain.faults import fault_sentences
from gradloc.explain.numbers import number
from gradloc.record import Event
from gradloc.record.reading import read
from lab.benchmarks.links import FAULTS as TRUTH
from tests.adapters.verl09.harness import HEALTHY, NEW_ROW
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


def test_undone_between_epochs_a_step_has_the_norm_of_the_epoch_before(call, tmp_path):
    """Importance ratios follow the weights: the loss is verl's own at the log-probs that they then give."""
    (norms, _) = call("train_until_ratios_run_away", [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    *_, event = read_events(tmp_path)
    found, spike = event["fault"], event["trigger"]["grad_norm"]
    assert (event["step"]["global_step"], event["step"]["epoch"]) == (HEALTHY + 1, 1)
    first_epoch = 2 * norms[-1] - spike  # verl has their mean
    assert found["evidence"]["norm_without_update"] == pytest.approx(first_epoch, rel=1e-2)
    assert found["at"] == "last_update" and found["parameters"][0] == "lm_head.weight"


def test_a_batch_that_is_loud_only_since_the_last_update_is_so_in_the_event(call, tmp_path):
    """Ratios ran away in an epoch before, of this batch's rows alone: still the batch is at fault, and since when."""
    call("train_until_a_new_token_runs_away", [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    *_, event = read_events(tmp_path)
    found, evidence = event["fault"], event["fault"]["evidence"]
    assert (event["step"]["global_step"], event["step"]["epoch"]) == (HEALTHY + 1, 1)
    assert found["at"] == "batch" and found["reason"].endswith("the batch is loud only since the last update"), found
    before = evidence.get("loudest_norm_without_update", evidence.get("norm_without_update"))
    (said,) = (each for each in fault_sentences(read(Event, event)) if "only since the last update" in each)
    assert before < evidence["norm"] / 2 and (number(before, 3) in said or "loudest_norm" not in evidence)
    assert event["culprits"] and {culprit["row"] for culprit in event["culprits"]} == {NEW_ROW}
