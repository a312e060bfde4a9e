# SPDX-License-Identifier: Apache-2.0
"""A planted token in every layout: named, certified, written; and a run that only looks stays what it was."""

import pytest

from tests.world import REPO
from tests.world.events import read_events

from .conftest import HERE
from .layouts import CLIPPED, LAYOUTS, in_layouts

ACTOR = "actor_rollout_ref.actor"
ON = ["+gradloc=on", f"{ACTOR}.gradloc.trigger.tau=100"]
PAGE = (REPO / "docs" / "megatron.md").read_text(encoding="utf-8")
PLANT, OF_TIED = (5, 3, 1e4), (5, 3, -1e4)  # what the ratio does not clip
NORMS = {"float32": 1e-5, "bfloat16": 2e-2}
BANDS = {"float32": 0.03, "bfloat16": 0.15}
"""How far closure may be off beside its own error: search.share's."""


@in_layouts(*LAYOUTS)
def test_a_planted_token_is_named_and_the_run_stays_what_it_was(world, layout, tmp_path):
    of, folder = LAYOUTS[layout], str(tmp_path / "model")
    world.run(f"{HERE}.harness.save_model", folder=folder, tied=of.is_tied, kind=of.experts)
    given = {"model_dir": folder, "plants": (OF_TIED if of.is_tied else PLANT,), "dtype": of.dtype}
    stock = world.run(f"{HERE}.harness.train", overrides=of.overrides, stock=True, **given)
    settings = [*ON, *of.overrides, f"{ACTOR}.gradloc.dump_dir={tmp_path}"]
    watched = world.run(f"{HERE}.harness.train", overrides=settings, **given)
    assert "GradLocMegatronEngine" in watched[0]["engine"]
    for one, other in zip(stock, watched, strict=True):
        assert one["norms"] == other["norms"]
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    (oracle, *_) = world.run(f"{HERE}.harness.norm_of_transformers", model_dir=folder, dtype=of.dtype)
    rounds = "CP 2" in layout and "by tokens" in layout  # verl floors half of each micro-batch's number of tokens
    assert stock[0]["norms"][0] == pytest.approx(oracle, rel=NORMS["bfloat16" if rounds else of.dtype])
    if rounds:
        assert f"verl's own norm is {100 * (stock[0]['norms'][0] / oracle - 1):.1f}% above" in PAGE
    *_, event = read_events(tmp_path)
    (culprit,), shares = event["culprits"], event["shares"]
    assert (culprit["row"], culprit["positions"]) == (5, [3])
    assert culprit["cause"]["label"] == "extreme_advantage"
    assert event["certificate"]["verdict"] == "explained"
    assert shares["is_trusted"]
    assert abs(shares["closure"] - 1) < max(BANDS[of.dtype], 3 * shares["closure_error"])
    assert 0.1 < event["head_grad_norm"] / event["trigger"]["grad_norm"] < 1
    assert event["consequence"]["grad_clip"] == (0.5 if CLIPPED in of.overrides else 1.0)
