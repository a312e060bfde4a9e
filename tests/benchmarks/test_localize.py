# SPDX-License-Identifier: Apache-2.0
"""A tiny run of the localization benchmark: it plants, finds, counts and writes what it says."""

import json

import pytest
import torch

from lab.benchmarks.localization.plan import Cell, full, quick
from lab.benchmarks.localization.published import formula_cost
from lab.benchmarks.localization.scenarios import PLANTS, SCENARIOS, WHOLE, Planter
from lab.benchmarks.localization.tables import markdown
from lab.benchmarks.localize import measure
from lab.benchmarks.run import finish
from tests.toy_model import AGGREGATIONS, Loss, build, random_batch

pytestmark = pytest.mark.full

CELLS = [
    Cell("battery", "single_10", 256, 2, 2, "XS", strategies=("published", "auto")),
    Cell("battery", "cancel_plus_one", 256, 2, 2, "XS", strategies=("auto",)),
    Cell("plants", "certain", 256, 2, 2, "XS", strategies=("auto",)),
    Cell("plants", "batch_4", 256, 2, 2, "XS", strategies=("auto",), aggregation=AGGREGATIONS[2], has_history=True),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return measure(CELLS, "cpu", 1, folder, "test", folder / "out", training_steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2], ids=["loud", "sure"])
def test_auto_finds_a_planted_culprit_and_names_nothing_else(run, number):
    found = run["cells"][number]["strategies"]["auto"]
    assert (found["recall"], found["false_positives"], found["verdict"]) == (1.0, 0, "explained")
    assert run["cells"][number]["spikes"] and found["gradient_restored"]


@pytest.mark.slow
def test_the_planted_token_is_what_brute_force_says_it_is(run):
    for cell in run["cells"][:3]:
        oracle = cell["oracle"]
        assert oracle["smallest_planted"] > 3 * cell["history"]["median_norm"]
        assert oracle["largest_other_in_pool"] < oracle["smallest_planted"]


@pytest.mark.slow
def test_of_a_scaled_batch_nothing_is_named_and_there_is_no_recall(run):
    scaled = run["cells"][3]
    found = scaled["strategies"]["auto"]
    assert scaled["grad_norm"] / scaled["threshold"] == pytest.approx(4.5 / 4.0, rel=1e-3)
    assert (found["recall"], found["false_positives"], found["source"]) == (None, 0, "batch_scale")
    assert scaled["oracle"]["planted"] == 0 and scaled["oracle"]["smallest_planted"] is None
    assert (
        "| batch_4 | float32 | seq-mean-token-mean | yes | - | 0 | 1 not_explained | 1 batch_scale | 0 | - |"
        in markdown(run)
    )


@pytest.mark.slow
def test_every_table_can_do_without_a_recall(run):
    for sweep in ("battery", "ranks", "pretrained"):
        moved = {**run["cells"][3], "cell": {**run["cells"][3]["cell"], "sweep": sweep}}
        moved["strategies"] = {"auto": {**moved["strategies"]["auto"], "norm_without": 1.0}}
        assert "batch_4" in (text := markdown({**run, "cells": [moved]})) and "None" not in text


@pytest.mark.slow
def test_the_published_search_costs_what_its_formula_says(run):
    single = run["cells"][0]
    auto, published = (single["strategies"][name]["cost_f"] for name in ("auto", "published"))
    assert auto < published == single["published_formula_f"] == formula_cost(2, 2, 64) == 6 * 2 + 6 * (1 + 6)


@pytest.mark.slow
def test_the_record_is_plain_json_with_its_origin_and_the_tables_name_all(run, tmp_path):
    finish(run, tmp_path, "localize", markdown(run))
    kept = json.loads((tmp_path / "localize.json").read_text())
    for key in ("schema_version", "command", "core_sha256", "machine", "versions", "cells"):
        assert key in kept
    assert kept["is_complete"]
    for cell in kept["cells"]:
        assert cell["history"]["steps"] >= 16, "a threshold needs the trigger's warm-up"
        for found in cell["strategies"].values():
            keys = ("false_positives", "forwards", "backwards", "cost_f", "seconds")
            assert all(found[key] is not None for key in keys)
            assert (found["recall"] is None) == (cell["cell"]["scenario"] in WHOLE)
    text = (tmp_path / "localize.md").read_text()
    for word in ("single_10", "cancel_plus_one", "certain", "batch_4", "published", "auto", "explained"):
        assert word in text


def test_the_full_plan_covers_the_whole_battery_in_both_precisions_and_three_seeds():
    battery = [cell for cell in full() if cell.sweep == "battery"]
    cells = {(cell.scenario, cell.dtype, cell.seed) for cell in battery}
    assert len(cells) == len(battery) == len(SCENARIOS) * 2 * 3
    assert {cell.scenario for cell in quick()} >= set(SCENARIOS)


def test_the_full_plan_plants_sure_culprits_and_scaled_batches_in_all_their_forms():
    forms = {(c.scenario, c.dtype, c.seed, c.aggregation, c.has_history) for c in full() if c.sweep == "plants"}
    names = {name: len([form for form in forms if form[0] == name]) for name in PLANTS}
    assert names == {"certain": 4, "likely": 4, "batch_4": 24, "batch_100": 24}
    assert {form[3] for form in forms} == set(AGGREGATIONS) and not set(PLANTS) & set(SCENARIOS)


def planter(sharpness: float, aggregation: str = AGGREGATIONS[0]) -> Planter:
    """Into a step of a random model whose logits are so many times a random model's."""
    model = build("tiny")
    with torch.no_grad():
        model.head.weight.mul_(sharpness)
    return Planter(model, random_batch(model), 0.5, 0, loss=Loss(aggregation=aggregation))


@pytest.mark.parametrize(("name", "least", "most"), [("certain", 0.99, 1 - 1e-6), ("likely", 0.5, 0.95)])
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_a_sure_culprit_is_as_likely_and_as_loud_as_it_says(name, least, most, sharpness):
    made = planter(sharpness)
    planted = PLANTS[name](made)
    (place,) = planted.places
    oracle = made.oracle(planted.batch)
    probabilities = oracle.logits(place).softmax(-1)
    assert probabilities.argmax() == planted.batch.labels[place] and made.batch.mask[place]
    assert least <= float(probabilities.max()) <= most
    assert oracle.norm(place) == pytest.approx(10 * made.healthy_norm, rel=1e-4)
    assert (planted.batch.amplified is None) == (sharpness > 1), "a model that is nowhere sure is made surer there"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_scaled_batch_is_the_healthy_one_so_many_times(aggregation):
    made = planter(1.0, aggregation)
    planted = PLANTS["batch_4"](made)
    whole, healthy = (made.oracle(batch).gradient() for batch in (planted.batch, planted.healthy))
    torch.testing.assert_close(whole, 4.5 * healthy, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
    assert planted.places == [] and len(set(planted.batch.mask.sum(-1).tolist())) > 1
