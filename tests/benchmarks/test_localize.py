# SPDX-License-Identifier: Apache-2.0
"""A tiny run of the localization benchmark: it plants, finds, counts and writes what it says."""

import json

import pytest

from benchmarks.localization.plan import Cell, full, quick
from benchmarks.localization.published import formula_cost
from benchmarks.localization.scenarios import SCENARIOS
from benchmarks.localization.tables import markdown
from benchmarks.localize import measure, write

pytestmark = pytest.mark.full

CELLS = [
    Cell("battery", "single_10", 256, 2, 2, "XS", strategies=("published", "auto")),
    Cell("battery", "cancel_plus_one", 256, 2, 2, "XS", strategies=("auto",)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return measure(CELLS, "cpu", 1, folder, "test", folder / "out", training_steps=40)


def test_auto_finds_a_planted_culprit_and_names_nothing_else(run):
    single = run["cells"][0]
    assert single["spikes"]
    found = single["strategies"]["auto"]
    assert (found["recall"], found["false_positives"]) == (1.0, 0)
    assert found["verdict"] == "explained"
    assert found["cost_f"] < single["strategies"]["published"]["cost_f"]
    assert found["gradient_restored"]


def test_the_planted_token_is_what_brute_force_says_it_is(run):
    for cell in run["cells"]:
        oracle = cell["oracle"]
        assert oracle["smallest_planted"] > 3 * cell["history"]["median_norm"]
        assert oracle["largest_other_in_pool"] < oracle["smallest_planted"]


def test_the_published_search_costs_what_its_formula_says(run):
    single = run["cells"][0]
    assert formula_cost(2, 2, 64) == 6 * 2 + 6 * (1 + 6)
    assert single["strategies"]["published"]["cost_f"] == single["published_formula_f"]


def test_the_record_is_plain_json_with_its_origin(run, tmp_path):
    write(run, tmp_path)
    kept = json.loads((tmp_path / "localize.json").read_text())
    for key in ("schema_version", "command", "core_sha256", "machine", "versions", "cells"):
        assert key in kept
    assert kept["is_complete"]
    for cell in kept["cells"]:
        assert cell["history"]["steps"] >= 16, "a threshold needs the trigger's warm-up"
        for found in cell["strategies"].values():
            keys = ("recall", "false_positives", "forwards", "backwards", "cost_f", "seconds")
            assert all(found[key] is not None for key in keys)
    assert "single_10" in (tmp_path / "localize.md").read_text()


def test_the_tables_name_every_scenario_and_strategy(run):
    text = markdown(run)
    for word in ("single_10", "cancel_plus_one", "published", "auto", "explained"):
        assert word in text


def test_the_full_plan_covers_the_whole_battery_in_both_precisions_and_three_seeds():
    battery = [cell for cell in full() if cell.sweep == "battery"]
    cells = {(cell.scenario, cell.dtype, cell.seed) for cell in battery}
    assert len(cells) == len(battery) == len(SCENARIOS) * 2 * 3
    assert {cell.scenario for cell in quick()} >= set(SCENARIOS)
