# SPDX-License-Identifier: Apache-2.0
"""The price of a spike, on a tiny model: both precisions in turn, and a batch with and without a history of scales."""

import json

import pytest
import torch

from lab.benchmarks import pretrained, spiking

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(world, llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("spiking")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "folder", lambda cache: llama)
        patch.setattr(pretrained, "text", lambda model: torch.arange(96))
        made = spiking.measure(world, ["batch_alone", "batch"], list(spiking.LIMITS), 2, 6, out, out)
    assert json.loads((out / "spiking.json").read_text()) == json.loads(json.dumps(made))
    return {"command": "test", **made}


def case(run, name, dtype):
    (found,) = [case for case in run["cases"] if (case["case"], case["dtype"]) == (name, dtype)]
    return found


def test_every_case_is_timed_in_both_precisions_each_with_its_own_healthy_norm(run):
    exact, half = (run["healthy_norm"][dtype] for dtype in ("float32", "bfloat16"))
    assert exact != half and half == pytest.approx(exact, rel=0.05)
    for found in run["cases"]:
        assert (len(found["with"]), len(found["without"])) == (2, 2)
        assert all(update["norm"] > 4 * run["healthy_norm"][found["dtype"]] for update in found["with"])
    timed = [(found["case"], found["dtype"]) for found in run["cases"] if found["published"]]
    assert timed == [("batch_alone", "float32")] and len(run["cases"]) == 4


@pytest.mark.parametrize("dtype", spiking.LIMITS)
def test_a_scaled_batch_is_told_by_the_history_every_time_and_searched_without(run, dtype):
    assert [found["cost_f"] for found in case(run, "batch", dtype)["with"]] == [0, 0]
    assert all(found["cost_f"] > 0 and "closure" in found for found in case(run, "batch_alone", dtype)["with"])


def test_the_table_has_a_row_for_each_case_and_precision_with_its_limit(run):
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in spiking.markdown(run).splitlines()[4:]]
    assert {len(row) for row in cells} == {14}
    limits = {(row[0], row[1]): float(row[4]) for row in cells}
    assert limits == {(f["case"], f["dtype"]): spiking.LIMITS[f["dtype"]][f["case"]] for f in run["cases"]}
    assert all((row[7] == "-") == (row[0] == "batch") for row in cells)
