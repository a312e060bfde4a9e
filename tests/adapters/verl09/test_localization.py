# SPDX-License-Identifier: Apache-2.0
"""A planted token in verl 0.9's engine: named, certified, written; and a run that only looks stays what it was."""

import json

import pytest

from .test_stock import LAYOUTS

ACTOR = "actor_rollout_ref.actor"
ON = ["+gradloc=on", f"{ACTOR}.gradloc.trigger.tau=100"]
PLANT = (5, 3, 1e4)


def events_in(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_planted_token_is_named_and_the_run_stays_what_it_was(train, layout, tmp_path):
    stock = train(LAYOUTS[layout], stock=True, plants=(PLANT,))
    watched = train([*ON, *LAYOUTS[layout], f"{ACTOR}.gradloc.dump_dir={tmp_path}"], plants=(PLANT,))
    assert watched[0]["engine"] == "GradLocEngine"
    for one, other in zip(stock, watched, strict=True):
        assert one["norms"] == other["norms"]
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    *_, event = events_in(tmp_path)
    assert event["certificate"]["verdict"] == "explained"
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["positions"]) == (5, [3])
    assert culprit["cause"]["label"] == "extreme_advantage"
    head, norm = event["head_grad_norm"], event["trigger"]["grad_norm"]
    assert head == 0 if layout == "LoRA" else 0.1 * norm < head < norm
    assert head == pytest.approx(event["kinds"].get("head", head)), "FSDP1's flat parameters have no kinds"
    largest = watched[0]["metrics"]["gradloc/head_grad_norm"]
    assert largest >= head * 0.9999 and (layout == "mini-batches and epochs" or largest == pytest.approx(head))
