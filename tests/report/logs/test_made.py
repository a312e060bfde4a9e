# SPDX-License-Identifier: Apache-2.0
"""Terminal, page and health say one thing of a log, the golden facts; of a damaged one nothing that is not so."""

import random
import re
import time
from itertools import zip_longest

import pytest

from gradloc.report.cli import main
from tests.report.golden import LOGS, known, told_of_log
from tests.report.logs.made import FILES, REFUSED
from tests.report.logs.test_pieces import COLLECTED, FOLDER

GOLDEN = known("logs.json")
SEEDS = 100
"""Damaged logs."""
AGAIN = "where it is meant: python -m tests.report.golden"
VERLS_KEYS = ("actor_rollout_ref", "algorithm.", "trainer.resume", "trainer.ro", "data.max", "critic.")


@pytest.mark.parametrize("name", LOGS)
def test_every_surface_says_the_golden_facts_of_a_log(name, tmp_path):
    told = told_of_log(name, tmp_path)
    assert {part: value for part, value in told.items() if value} == GOLDEN[name], AGAIN
    if "verl" not in told["format"]:
        assert not [key for key in VERLS_KEYS if key in " ".join(told.values())]


WHOLE = {name: (text.encode(), (73, 903.0)) for name, text in FILES.items()}
WHOLE |= {
    name: ((FOLDER / name).read_bytes(), tuple(right["peak"]))
    for name, right in COLLECTED.items()
    if right.get("peak", [0, 0])[1] in (903.0, 1903.0)
}
"""What each file of one run holds, and the step and norm of its spike."""


def damaged(seed):
    """A file's name; it cut, shuffled, doubled, noisy, mixed with another, or with rows, a name or a column changed;
    and the spikes that it may have."""
    rng = random.Random(seed)
    name, kind = rng.choice(list(WHOLE)), rng.randrange(9)
    content, spike = WHOLE[name]
    spikes = {spike}
    head, *body = content.split(b"\n")
    if kind == 0:
        content = content[: rng.randrange(1, len(content))]
    elif kind == 1:
        rng.shuffle(body)
        content = b"\n".join([head, *body])
    elif kind == 2:
        content = content + b"\n" + content
    elif kind == 3:
        content = content.replace(b"grad_norm", rng.choice([b"gn", b"grad.norm", b"gradient_norm", b"gradnorm"]))
    elif kind == 4:
        content = b"\n".join(line for line in [head, *body] if rng.random() > 0.2)
    elif kind == 5:
        content = b"\n".join([head, *(line.rpartition(b"," if b"," in line else b" ")[0] for line in body)])
    elif kind == 6:
        content = b"\n".join(line for line in [head, *body] for _ in range(rng.choice((1, 1, 2))))
    elif kind == 7:
        for _ in range(20):
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(rng.randint(1, 40)) + content[at:]
    else:
        other, its_spike = WHOLE[rng.choice(list(WHOLE))]
        pairs = zip_longest([head, *body], other.split(b"\n"))
        content = b"\n".join(line for pair in pairs for line in pair if line is not None)
        spikes.add(its_spike)
    return name, content, spikes


@pytest.mark.full
def test_of_a_damaged_log_no_step_and_no_norm_is_told_that_is_not_so(tmp_path, capsys):
    num_told, wrong = 0, []
    for seed in range(SEEDS):
        name, content, spikes = damaged(seed)
        (tmp_path / name).write_bytes(content)
        code = main([str(tmp_path / name)])
        said = "".join(capsys.readouterr())
        if code:
            continue
        for unit, step, norm in re.findall(r"(Step|Row|Batch) (\S+): gradient norm ([\d.,]+\d)", said):
            told = float(norm.replace(",", ""))
            num_told += 1
            place = int(step.replace(",", ""))
            is_row = unit == "Row" and (norm in row_of(name, content, place) or "Only the form with more" in said)
            is_so = any(told == pytest.approx(known, rel=5e-3) and (place == at or is_row) for at, known in spikes)
            wrong += [] if is_so else [(seed, name, step, norm)]
    assert num_told > SEEDS / 4 and not wrong


def row_of(name, content, place):
    """The line of a file that is its row of this number: below the head of a table, else of those with a norm."""
    lines = content.decode(errors="replace").splitlines()
    norm = re.compile(r"(?:grad\w*[._ ]?norm|\bgn(?:orm)?)\b.*\d")
    rows = lines[1:] if name.endswith(".csv") else [line for line in lines if norm.search(line)]
    return rows[place - 1] if place <= len(rows) else ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_misread_is_refused(name, tmp_path, refused):
    content, why = REFUSED[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert why in refused(tmp_path / name)


ANSWERS = {"prose": "the loss is (a) step of x.y " * 2000, "a word": "a" * 60000, "dots": "a." * 30000}


@pytest.mark.slow
@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_line_that_holds_a_whole_answer_takes_no_time(text, tmp_path, capsys):
    lines = FILES["torchtune.txt"].split("\n")
    (tmp_path / "run.log").write_text("\n".join(f"{line} step 5 {text}" for line in lines), encoding="utf-8")
    before = time.process_time()
    assert main([str(tmp_path / "run.log")]) == 0
    assert time.process_time() - before < 20 and "Step 73: gradient norm 903" in capsys.readouterr().out
