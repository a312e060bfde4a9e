# SPDX-License-Identifier: Apache-2.0
"""The GPU's benchmark, small and on a CPU: all its parts; what it writes where a cell fails; and its page."""

import json
import re
import runpy
import statistics

import pytest

from gradloc.core.memory_plans import GIB, PLANS
from gradloc.forecast import MODELS, PINNING
from lab.benchmarks.counter import DeviceCounter
from lab.benchmarks.gpu import __main__ as gpu
from lab.benchmarks.gpu import cells, forecast
from lab.benchmarks.run import digest
from tests.world import REPO

RESULTS = REPO / "lab" / "benchmarks" / "results" / "gpu.json"
PAGE, HOW_TO, OBSERVE, README = (
    (REPO / name).read_text(encoding="utf-8")
    for name in ("docs/gpu.md", "docs/how-to.md", "docs/observe.md", "README.md")
)


@pytest.mark.full
def test_the_first_part_runs_and_holds(tmp_path, capsys):
    given = ["--device", "cpu", "--size", "tiny", "--tokens", "64", "--parts", "first", "--out", str(tmp_path)]
    assert gpu.main(given) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_all_parts_run_and_hold_on_kernels_that_repeat(tmp_path, capsys):
    given = ["--device", "cpu", "--size", "tiny", "--tokens", "128", "--attention", "varlen", "--out", str(tmp_path)]
    assert gpu.main(given) == 0, capsys.readouterr().out
    run = json.loads((tmp_path / "gpu.json").read_text())
    found = {part: [cell for cell in run["cells"] if cell["part"] == part] for part in gpu.PARTS}
    assert all(found.values()) and all(cell["is_ok"] is not False for cell in run["cells"])
    spikes = [cell for cell in found["first"] + found["cells"] if "plant" in cell]
    assert [cell["plant"] for cell in spikes] == ["single_10", "three", *cells.PLANTS]
    for cell in spikes:
        assert (cell["recall"], cell["false_positives"], cell["verdict"]) == (1.0, 0, "explained")
        assert cell["times_update"] > 1 and 0.8 <= cell["closure"] <= 1.25
    assert found["mask"][0]["difference"] == found["first"][1]["backward_difference"] == 0.0
    assert [cell["recall"] for cell in found["room"][:2]] == [1.0, 1.0]
    assert found["syncs"][0]["search"] and not found["syncs"][0]["healthy"]
    table = (tmp_path / "gpu.md").read_text()
    assert all(f"| {cell['part']} | {cell['cell']} |" in table for cell in run["cells"])


def test_only_waits_in_the_package_are_ours_whatever_the_clone_is_called(tmp_path):
    folder = tmp_path / "gradloc" / "tests"
    folder.mkdir(parents=True)
    (folder / "reads.py").write_text("import torch\ntorch.ones(2, device='cpu').sum().item()\n")
    with DeviceCounter() as counter:
        runpy.run_path(str(folder / "reads.py"))
    assert sum(counter.reads.values()) == 1 and not counter.places


@pytest.mark.slow
def test_a_cell_that_fails_is_written_and_the_others_go_on(tmp_path, monkeypatch):
    def fail(bench):
        raise RuntimeError("no kernel for this card")

    monkeypatch.setattr(cells, "repeat_cell", fail)
    given = ["--device", "cpu", "--size", "tiny", "--tokens", "128", "--parts", "first", "--out", str(tmp_path)]
    assert gpu.main(given) == 1
    run = json.loads((tmp_path / "gpu.json").read_text())
    assert [cell["is_ok"] for cell in run["cells"]] == [True, False, True, True]
    assert run["cells"][1]["error"] == "RuntimeError: no kernel for this card"
    assert "| NO |" in (tmp_path / "gpu.md").read_text()


def test_the_page_has_the_table_that_the_forecast_makes(capsys):
    assert gpu.main(["--forecast", "--tokens", "16384"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in PAGE and all(f"| {name} | 512 |" in printed for name in ("0.5B", "235B"))


def test_a_whole_search_fits_wherever_training_leaves_an_eighth_of_a_card():
    """And the pages say the most that it needs, in memory and in time."""
    most, longest = 0.0, 0.0
    for model in forecast.MODELS.values():
        for count in forecast.GPUS:
            found = forecast.forecast_of(model, count, 16384)
            if found.trained <= forecast.CARD:
                whole = [found.device(plan) - found.trained for plan in forecast.PLANS if plan.is_full]
                assert whole == sorted(whole, reverse=True) and min(whole) <= 0.12 * forecast.CARD
                most, longest = max(most, *whole), max(longest, *map(found.seconds, PLANS[1:3]))
    assert f"up to {most / GIB:.0f} GiB of a card of 80 GB" in HOW_TO and f"up to {longest:.0f} s by the" in OBSERVE


def test_the_seconds_of_the_host_are_those_that_a_card_took():
    """The forecast's for pinning, the page's, and that the copies of a search are not found cheaper than they were."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    plain, registered = (statistics.median(each["pin_seconds_a_gib"]) for each in record["pinning"])
    assert 2**30 / PINNING == pytest.approx(plain, rel=0.05)
    copying = statistics.median(record["pinning"][0]["to_host"] + record["pinning"][0]["back"])
    assert f"pinning a GiB took {plain:.2f} s, copying it {copying:.2f} s" in PAGE
    assert f"made it {registered:.2f} s" in PAGE
    cells = [cell for run in record["runs"] for cell in run["cells"] if cell.get("model") == "1.5B bfloat16 x1"]
    took = {cell["way"]: cell["seconds"] for cell in cells if cell["part"] == "room" and cell["tokens"] == 32768}
    found = forecast.forecast_of(MODELS["1.5B"], 1, 32768)
    assert took[2] - took[1] <= found.seconds(PLANS[2]) - found.seconds(PLANS[1]) <= 2 * (took[2] - took[1])


def test_the_results_are_the_record_s():
    """The page's figures are the record's, and it says which parts have not run and whose code the record is of."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    assert all(run["core_sha256"] != digest() for run in runs) == ("with an earlier version" in PAGE)
    cells = [cell for run in runs for cell in run["cells"]]
    on_one = [cell for cell in cells if not cell.get("model", "").endswith(" x2")]
    form = PAGE[PAGE.index("## Results") :]
    found = {row[1]: row[3] for line in form.splitlines() if len(row := re.split(r" ?\| ?", line)) > 3}
    assert found.keys() - {"part", "---"} == set(gpu.PARTS)
    ran = {cell["part"] for cell in on_one} | {"two" for cell in cells if cell not in on_one}
    assert all(("not run" in found[part]) == (part not in ran) for part in gpu.PARTS)
    updates = [cell["update_seconds"] for cell in on_one if "update_seconds" in cell]
    assert f"{min(updates):.1f} to {max(updates):.1f} s: the device waited" in form

    spikes = [cell for cell in cells if "plant" in cell]
    assert all((cell["recall"], cell["false_positives"], cell["is_ok"]) == (1.0, 0, True) for cell in spikes)
    times = [cell["times_update"] for cell in spikes]
    said = f"takes {min(times):.1f} to {max(times):.1f} times an update"
    assert (
        said in found["first"] and f"took {said.removeprefix('takes ').replace('times an update', 'updates')}" in README
    )
    differ = max((cell["backward_difference"], cell["tokens"]) for cell in cells if cell["cell"] == "repeats")
    assert f"{100 * differ[0]:.1f} % ({differ[1] // 1024}k)" in found["first"]
    costs = [100 * cell["cost"] for cell in on_one if cell["cell"] == "tracker"]
    assert f"it took {min(costs):.1f} to {max(costs):.1f} % of an update" in found["first"]
    (cost,) = (100 * cell["cost"] for cell in cells if cell["cell"] == "tracker" and cell not in on_one)
    assert f"The tracker took {cost:.2f} %" in found["two"]

    room = {cell["way"]: cell for cell in cells if cell["part"] == "room"}  # of two runs the later, which has all
    ways = {way: f"{cell['seconds']:.1f} s, {cell['peak_gib']:.1f} GiB" for way, cell in room.items()}
    assert all(f"{what}: {ways[way]}" in found["room"] for way, what in {2: "copies, too", 3: "bisection"}.items())
    assert f"Adam's state on the host: {ways[1]}" in found["room"] and all(cell["is_ok"] for cell in room.values())
    masked = {cell["tokens"]: cell["difference"] for cell in cells if cell["part"] == "mask"}
    assert masked[4096] == 0 and f"at 16k it differs by {100 * masked[16384]:.1f} %" in found["mask"]
    waits = {cell["tokens"]: sum(cell["search"].values()) for cell in cells if cell["part"] == "syncs"}
    assert f"{waits[4096]} (4k) and {waits[16384]} (16k) times" in found["syncs"]
    under = [1 - cell["peak_gib"] / cell["forecast_gib"] for cell in cells if "peak_gib" in cell]
    assert f"the peak was {round(100 * min(under))} to {round(100 * max(under))} % under" in found["cells"]
