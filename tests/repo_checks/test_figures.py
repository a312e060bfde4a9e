# SPDX-License-Identifier: Apache-2.0
"""Every figure of a page that stems from a kept record is that record's; a page whose figures do not says so."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gradloc.config import ActionConfig
from gradloc.explain import story
from gradloc.notify.lines import announcement
from gradloc.report.logs.recording import MEAN
from gradloc.report.runs.run import read_run
from gradloc.search import limit
from gradloc.watch.rows import StepCounts
from lab.benchmarks import architectures, counts, links, ranks, unrepeatable, worlds
from lab.benchmarks.spikes import scoring
from lab.benchmarks.trigger import __main__ as trigger
from lab.experiments.llm import natural
from lab.experiments.loop import pretrain
from lab.output import table
from tests.report import hostile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results"
DEMO = read_run(ROOT / "examples" / "demo")
(EVENT,) = DEMO.events


def page(name: str) -> str:
    """A page's text with its lines joined, so that a sentence is found wherever it breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def section(name: str, title: str) -> str:
    """What stands under a heading of docs, up to the next one of its level."""
    level, text = title.split()[0], (ROOT / "docs" / name).read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(title)}$(.*?)(?=^{level} |\Z)", text, re.S | re.M)
    assert found, f"{name} has no {title}"
    return found[1]


def rows(text: str) -> list[str]:
    """The rows of a text's tables that hold a number, without their heads."""
    lines = text.splitlines()
    below = [*lines[1:], ""]
    tabled = [line for line, after in zip(lines, below, strict=True) if not after.startswith("| ---")]
    return [line for line in tabled if line.startswith("|") and re.search(r"\d", line)]


def as_suites_do(columns: Callable[[dict], Any]) -> Callable[[dict], str]:
    return lambda found: table(columns(found))


def both_counts(found: dict) -> str:
    return "\n".join(map(counts.markdown, (found, record("counts-0.9"))))


PARTS = {
    "benchmarks.md## What an update asks of the device": ("counts-0.7", both_counts),
    "benchmarks.md## The trigger's rule": ("trigger", trigger.markdown),
    "benchmarks.md## Kernels that do not repeat": ("unrepeatable", lambda found: unrepeatable.markdown(found["rows"])),
    "benchmarks.md## Worlds": ("worlds", lambda found: worlds.markdown(found["rows"])),
    "natural-spikes.md## What acting changed": ("natural", as_suites_do(natural.effects_table)),
}
"""Of these tables the pages show rows; of the next, all."""
WHOLE = {
    "natural-spikes.md## What they are made of": ("natural", as_suites_do(natural.composition_table)),
    "natural-spikes.md## What heals them": ("natural", as_suites_do(natural.cures_table)),
    "natural-spikes.md## Every event": ("natural", as_suites_do(natural.events_table)),
    "spikes-without-tokens.md## How often it is right": ("links", lambda found: links.matrix(found["rows"])),
    "gpu.md## Many ranks": ("ranks", ranks.markdown),
    "peers.md## The table": ("spikes", lambda found: scoring.comparison(scoring.planted(found["rows"]))),
    "peers.md## By kind": ("spikes", lambda found: scoring.by_kind(scoring.planted(found["rows"]))),
    "peers.md## Natural spikes": ("spikes", lambda found: scoring.comparison(scoring.natural(found["rows"]))),
    "peers.md## Natural spikes by kind": ("spikes", lambda found: scoring.by_kind(scoring.natural(found["rows"]))),
    "pretraining.md## By kind of damage": ("pretrain", as_suites_do(pretrain.by_kind)),
    "pretraining.md## Every peak": ("pretrain", as_suites_do(pretrain.peaks)),
}


def said_of_searches() -> Iterator[tuple[str, str]]:
    """What a search costs, in training steps: M forwards and backwards, 3 f each."""
    spiked = [row for row in record("worlds")["rows"] if row["status"] != "no spike"]
    found = [row for row in spiked if row["plant"] == "tokens"]
    one, eight = (median(row["cost"] / 3 / row["micro_batches"] for row in found if row["named"] == n) for n in (1, 8))
    for name in ("README", "docs/benchmarks"):
        yield name, f"one culprit costs {one:.1f} training steps, eight cost {eight:.1f}"
    right = sum(not row["problems"] for row in spiked)
    yield "docs/benchmarks", f"{right} of {len(spiked)} [worlds](#worlds) that spiked are right"
    yield (
        "docs/observe",
        (f"An update counts as {limit._LEAST_UPDATE} forwards and {limit._LEAST_SECONDS:.0f} s at least"),
    )
    for name in ("how-to", "any-loop"):
        yield (
            f"docs/{name}",
            (f"{ActionConfig.max_masked_tokens} tokens or {100 * ActionConfig.max_masked_share:.0f} % of the"),
        )


def said_of_healthy_steps() -> Iterator[tuple[str, str]]:
    """What gradloc costs where nothing spikes."""
    updates = [record(f"counts-{verl}")["updates"] for verl in ("0.7", "0.9")]
    shares = [100 * (of["healthy, on"]["ops"] / of["healthy, unpatched"]["ops"] - 1) for of in updates]
    for name in ("benchmarks", "gpu"):
        yield f"docs/{name}", f"{shares[0]:.1f} % (verl 0.7) or {shares[1]:.1f} % (0.9) more operations"
    yield "README", f"{min(shares):.1f} to {max(shares):.1f} % more operations on verl"
    (number,) = {found["a healthy step"]["messages"] for found in record("ranks")["ranks"].values()}
    words = ["no", "one", "two", "three", "four", "five", "six"]
    for name in ("observe", "any-loop"):
        yield f"docs/{name}", f"{words[number]} small messages"
    sums = f"sums {words[len(StepCounts._fields)]} numbers of each process"
    yield "docs/trl", f"{sums} and sends {words[number - 1]} small messages"
    found = record("driver")
    new, old = found["verl 0.9"], found["verl 0.7"]
    said = f"{found['rows']:,} rows of up to {found['longest'] // 1024}k tokens take {new:.2f} s of processor time"
    yield "docs/benchmarks", f"{said} on verl 0.9 and {old:.2f} s on 0.7"


def said_of_what_is_right() -> Iterator[tuple[str, str]]:
    """How often tokens, links and architectures are right; and what the demo's pages show of it."""
    yield "docs/any-loop", architectures.sentence(record("architectures"))
    for part in (scoring.planted, scoring.natural):
        yield "docs/peers", scoring.sentence(part(record("spikes")["rows"]))
    for name in ("links", "engine_links"):
        yield "docs/spikes-without-tokens", links.sentence(record(name)["rows"])
    yield "docs/report", f'("{story.odd_number(EVENT.culprits[0])}")'
    yield "docs/security", f"Each of {len(hostile.FILES) + len(hostile.RUNS)} hostile files"
    yield "docs/trackers", f"gradloc: {announcement(EVENT)}"
    yield "docs/trackers", f"gradloc: gradloc /runs/grpo/gradloc --event {EVENT.event_id}"


@pytest.mark.parametrize("said", [said_of_searches, said_of_healthy_steps, said_of_what_is_right])
def test_a_page_s_sentence_is_the_record_s(said):
    for name, sentence in said():
        assert sentence in page(f"{name}.md"), (name, sentence)


def test_the_limits_that_no_record_holds():
    assert (limit.MAX_STEPS, limit._LEAST_BISECTION_SECONDS) == (4, 60), "four, a minute: docs/observe.md"
    assert max(record("driver")[verl] for verl in ("verl 0.7", "verl 0.9")) < 0.3


@pytest.mark.parametrize("table", [*PARTS, *WHOLE])
def test_a_page_s_table_is_the_record_s(table):
    name, render = (PARTS | WHOLE)[table]
    text, made = section(*re.split(r"(?<=md)", table)), render(record(name)).splitlines()
    if table in PARTS:
        assert rows(text) and [row for row in rows(text) if row not in made] == []
    else:
        assert [line for line in text.splitlines() if line.startswith("|")] == made
        assert "Every event" not in table or len(made) - 2 >= 30


def test_what_pretraining_says_of_its_peaks_is_the_record_s():
    found = record("pretrain")
    named = {peak["step"]: set(peak["named"]) for peak in found["peaks"]}
    peaked = {name: pretrain.step_of(name) for name in found["damaged"] if pretrain.step_of(name) in named}
    right = sum(name in named[step] for name, step in peaked.items())
    said = f"Of {len(found['damaged'])} damaged documents {len(peaked)} made a peak; {right} of these are named"
    none = len(named) - len(set(peaked.values()))
    for sentence in (said, f"{none} of {len(named)} peaks had none"):
        assert sentence in page("docs/pretraining.md")
    assert right >= 0.9 * len(peaked)


def test_the_noise_s_figures_are_the_record_s():
    found = record("unrepeatable")["rows"]
    worst = max(abs(row["norm_after"] - row["truth"]) / row["error_bound"] for row in found)
    said = f"Over {len(found)} cells of noise, spike and precision the true norm lay within the bound every time, "
    assert f"{said}at most at {100 * worst:.0f} % of it" in page("docs/method.md")
    assert not [row for row in found if unrepeatable.problems(row)]


def test_what_the_trigger_s_page_says_of_series_is_the_record_s():
    found, text = record("trigger"), page("docs/trigger.md")
    real = {entry["name"]: entry["rules"] for entry in found["real"]}

    def flagged(name: str, rule: str) -> int:
        counted = real[name][rule]
        return counted["flagged"] + counted["over"] - counted["missed"]

    assert (flagged("trl-hotpotqa-grpo", "gradloc"), real["trl-hotpotqa-grpo"]["gradloc"]["over"]) == (5, 4)
    assert "(five of 93 flagged, four of them over ten times the median" in text
    assert f"flagged {flagged('verl-gsm8k-ppo-resp512-actor', 'before')} of these 435" in text
    false = {entry["name"]: entry["rules"]["gradloc"]["false_flags"]["mean"] / 10 for entry in found["healthy"]}
    assert f"four times as hard**: {false['10 % hard batches x 4']:.0f} false flags in 100 steps" in text
    assert f"{false['80% of steps x 0.01']:.1f} false flags in 100 steps, most of them before" in text
    healthy = [entry["rules"] for entry in found["healthy"]]
    kinds = sum(rules["gradloc"]["false_flags"]["median"] == 0 for rules in healthy)
    assert f"0 in the median of {kinds} of {len(healthy)} kinds of healthy run" in page("docs/benchmarks.md")
    assert {rules["gradloc"]["missed_x10"]["median"] for rules in healthy} == {0}
    assert sum(rules["before"]["missed_x10"]["median"] == 100 for rules in healthy) == 7, "`before` all in seven kinds"
    grown = [entry["rules"]["gradloc"] for entry in found["collapses"]]
    assert len(grown) == 12 and {(rule["unseen"]["median"], rule["back"]["median"]) for rule in grown} == {(0, 1)}


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_each_picture_of_a_page_names_the_command_that_draws_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    before = [above for above, line in zip(["", *lines], lines, strict=False) if line.startswith("![")]
    commands = [re.match("<!-- drawn by (python|gradloc|./run_experiment.sh) ", line) for line in before]
    assert all(commands), before


# ---- the demo's run in examples/


def test_the_demo_s_page_is_right_about_its_run():
    text = page("docs/experiments.md")
    tokens = int(re.search(r"about (\d+) response tokens", text)[1])
    assert EVENT.trigger.num_tokens == pytest.approx(tokens, rel=0.1)
    threshold = EVENT.trigger.tau / math.sqrt(tokens)
    assert f"640, the published value: {threshold:.0f} for {tokens} tokens" in text
    low, high = map(float, re.search(r"seeds 1 to 5 have norms from ([\d.]+) to ([\d.]+)", text).groups())
    assert all(low <= norm <= high for norm in DEMO.metrics.finite(MEAN) if norm < threshold)


# ---- transcripts


def test_the_health_page_s_transcript_is_what_the_command_prints():
    (command, shown) = re.search(r"^    \$ (gradloc health \S+)\n((?:    .*\n)+)", _health(), re.M).groups()
    arguments = [sys.executable, "-m", "gradloc.report", *command.split()[1:]]
    done = subprocess.run(arguments, cwd=ROOT, env={"COLUMNS": "120"}, capture_output=True, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    wanted = [line[4:].rstrip() for line in shown.splitlines()]
    assert wanted[-1] == "..." and lines[1 : len(wanted)] == wanted[:-1]


def _health() -> str:
    return (ROOT / "docs/health.md").read_text()


# ---- figures whose record is not kept


def test_the_explosion_s_text_says_what_its_table_says():
    cells = next(row for row in rows(section("explosion.md", "## The safeguards")) if row.startswith("| unprotected"))
    before, warning, spike = (float(cell) for cell in cells.split("|")[4:7])
    assert f"from {before} to {warning}" in page("docs/explosion.md")
    assert (round(warning / before), round(spike / before)) == (11, 185)  # "eleven and 185 times the healthy one"


@pytest.mark.parametrize("name", ["explosion", "knights", "quartiles", "trigger", "experiments", "benchmarks"])
def test_a_page_with_figures_of_runs_that_are_not_kept_says_so(name):
    assert re.search(r"[Nn]o record of (this|these) \w+ is kept", page(f"docs/{name}.md"))
