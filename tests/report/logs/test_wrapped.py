# SPDX-License-Identifier: Apache-2.0
"""What is around lines changes no answer, nor does another run: a quotation, numbers, ranks, a log store's JSON."""

import json

import pytest

from gradloc.report.runs.run import read_run
from tests.report.builder import REPO

LOGS = [
    *(f"trainers/{name}.log" for name in ("megatron", "nemo-rl", "openrlhf", "own-loop", "slime", "torchtitan")),
    "console/nan.log",
]
NANOGPT = "".join(f"{step} train {4 - step / 100:.6f}\n" for step in range(40)) + "40 train nan\n"
AROUND = {
    "none": "{line}\n",
    "carriage returns": "{line}\r\n",
    "quoted": "> {line}\n",
    "indented": "    {line}\n",
    "grep -n": "{at}:{line}\n",
    "a rank": "[rank0]: {line}\n",
    "times": "2025-06-01 10:00:00 {line}\n",
}


def answer(path):
    run = read_run(path)
    return [(made.kind, made.headline, made.sentences) for made in run.diagnoses]


@pytest.fixture(params=LOGS)
def log(request):
    return REPO / "tests" / "data" / "logs" / request.param


@pytest.mark.parametrize("around", AROUND)
def test_what_is_around_a_line_changes_no_answer(around, log, tmp_path):
    lines = log.read_text().splitlines()
    path = tmp_path / log.name
    path.write_bytes("".join(AROUND[around].format(at=at, line=line) for at, line in enumerate(lines, 1)).encode())
    assert answer(path) == answer(log)


def test_a_log_store_s_json_around_a_line_changes_no_answer(log, tmp_path):
    path = tmp_path / log.name
    entries = ({"log": f"{line}\n", "time": f"2025-06-01T10:00:00.{at:06d}Z"} for at, line in enumerate(log.open()))
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert answer(path) == answer(log)


@pytest.mark.parametrize("around", ["none", "quoted", "indented"])
def test_a_row_that_begins_with_its_step_is_read_in_a_quotation(around, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("".join(AROUND[around].format(line=line) for line in NANOGPT.splitlines()))
    assert [(kind, "step 40" in headline) for kind, headline, _ in answer(path)] == [("unfinite", True)]


@pytest.mark.parametrize("values", ["loss: {loss}", "loss: {loss} | grad_norm: {norm}"])
def test_rows_that_two_ranks_print_are_one_run_s(values, tmp_path):
    rows = [(step, 2 - step / 100, 1.0) for step in range(60)]
    rows[40] = (40, float("nan"), float("nan"))
    path = tmp_path / "train.log"
    line = f"{{rank}}: iter {{step}} | {values}\n"
    path.write_text("".join(line.format(rank=r, step=s, loss=x, norm=y) for s, x, y in rows for r in (0, 1)))
    assert len(answer(path)) == 1 and "40" in answer(path)[0][1]


@pytest.mark.parametrize("fault", [[float("nan")] * 20, [50.0] * 20, [50.0] + [1.0] * 19], ids=["nan", "high", "jump"])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_runs_in_a_log_the_worse_leads_without_norms_too(fault, is_first, tmp_path):
    sound = [2 - step / 100 for step in range(60)]
    runs = [sound, [loss + 0.01 for loss in sound[:40]] + fault]
    path = tmp_path / "train.log"
    lines = (f"iter {at}: loss {loss:.4f}\n" for run in runs[:: 1 - 2 * is_first] for at, loss in enumerate(run))
    path.write_text("".join(lines))
    (kind, headline, _), (other, *_) = answer(path)
    assert kind and not other and "step 40" in headline
