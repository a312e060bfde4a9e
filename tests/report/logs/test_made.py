# SPDX-License-Identifier: Apache-2.0
"""Terminal, page and health say one thing of a log, the golden facts; of a damaged one nothing that is not so."""

import random
import re
import time

import pytest

from gradloc.report.cli import main
from tests.report.golden import LOGS, known, told_of_log
from tests.report.logs.made import FILES, REFUSED

GOLDEN = known("logs.json")
AGAIN = "where it is meant: python -m tests.report.golden"
VERLS_KEYS = ("actor_rollout_ref", "algorithm.", "trainer.resume", "trainer.ro", "data.max", "critic.")


@pytest.mark.parametrize("name", LOGS)
def test_every_surface_says_the_golden_facts_of_a_log(name, tmp_path):
    told = told_of_log(name, tmp_path)
    assert {part: value for part, value in told.items() if value} == GOLDEN[name], AGAIN
    if "verl" not in told["format"]:
        assert not [key for key in VERLS_KEYS if key in " ".join(told.values())]


def damaged(seed):
    """A file's name, and it cut, shuffled, doubled, or with rows, a name or a column changed."""
    rng = random.Random(seed)
    name, kind = rng.choice(list(FILES)), rng.randrange(6)
    text = FILES[name]
    head, *body = text.split("\n")
    if kind == 0:
        text = text[: rng.randrange(1, len(text))]
    elif kind == 1:
        rng.shuffle(body)
        text = "\n".join([head, *body])
    elif kind == 2:
        text = f"{text}\n{text}"
    elif kind == 3:
        text = text.replace("grad_norm", rng.choice(["gn", "grad.norm", "gradient_norm", "gradnorm"]))
    elif kind == 4:
        text = "\n".join(line for line in [head, *body] if rng.random() > 0.2)
    else:
        text = "\n".join([head, *(line.rpartition("," if "," in line else " ")[0] for line in body)])
    return name, text


@pytest.mark.full
def test_of_a_damaged_log_no_step_and_no_norm_is_told_that_is_not_so(tmp_path, capsys):
    told = []
    for seed in range(200):
        name, text = damaged(seed)
        (tmp_path / name).write_text(text, encoding="utf-8")
        if main([str(tmp_path / name)]) == 0:
            said = capsys.readouterr().out
            found = re.findall(r"Step (\S+): gradient norm ([\d.,]+\d)", said)
            told += [("73" if "counted" in said else step, norm) for step, norm in found]  # then it says that, too
    assert len(told) > 50 and set(told) == {("73", "903")}


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
