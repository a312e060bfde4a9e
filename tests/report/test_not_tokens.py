# SPDX-License-Identifier: Apache-2.0
"""A spike that no token made accuses none: the page says what did, what it did to the step, and what to check."""

import csv
import io
import re

import pytest

from gradloc.record import Event
from gradloc.record.reading import read
from gradloc.report.pages import page
from gradloc.report.pages.exports import to_csv
from gradloc.report.runs.run import read_run
from gradloc.tell.lines import announcement
from tests.report.builder import make_metrics, write_run
from tests.report.not_tokens import CHECKPOINT, causes


@pytest.fixture(scope="module")
def events():
    return causes()


SAID = {
    "weights": [
        "Weights that are not finite broke step 412; no token did",
        "<li><code>blocks.1.mlp.up.weight</code></li>",
        "The trainer skipped the step, because its norm was not finite.",
        "Every further step will be like it until weights that are finite are loaded.",
        f"The newest checkpoint before it: {CHECKPOINT}.",
        f'data-copy="trainer.resume_mode=resume_path trainer.resume_from_path=&#39;{CHECKPOINT}&#39;"',
    ],
    "padding": [
        "Padding that is not finite broke step 412; no token did",
        "Only positions outside of the response mask have a loss that is not finite. The first: row ",
        "<li><code>advantages</code></li>",
        "trainer.rollout_data_dir=rollouts",
    ],
    "scale": [
        "The whole batch made the step-412 spike: all of it is scaled, no token stands out",
        "times the run&#39;s usual: it is the rewards, or how they are normalized.",
        "algorithm.norm_adv_by_std_in_grpo=false",
    ],
    "loss_scale": [
        "Its advantages are 1.1 times the run&#39;s usual: the loss or the ratios scale it.",
        "action.mode=skip",
    ],
    "transient": [
        "The step-412 spike did not come back when it was run again",
        "Hardware or a race made it, not the data.",
        "micro-batches run again gave a norm of",
        "action.mode=skip",
    ],
    "router": [
        "The step-412 spike did not come from the tokens",
        "passes through no token&#39;s log-prob or entropy; the tokens&#39; part has norm",
        "Look for what adds to or scales the gradient of ",
    ],
    "router_and_token": [
        "One token made part of the step-412 spike; the rest did not come from the tokens",
        "It carries 75% of the gradient.",
        "A gradient that is not the tokens&#39;",
        "The advantage is extreme",
    ],
    "entropy": ["The entropy term leads the step-412 spike; no single token does", "61.3×", "actor.entropy_coeff=0"],
    "nothing": [
        "Nothing was found that made the spike at step 412",
        "gradloc.evidence.rerun=true",
        "No token was named",
    ],
}


@pytest.mark.parametrize("name", SAID)
def test_the_page_says_what_made_it_and_accuses_no_token(events, tmp_path, name):
    text = page.render(read_run(write_run(tmp_path, [events[name]], metrics=make_metrics(30))))
    body = text.partition("<main>")[2].partition("</main>")[0].replace("<wbr>", "")
    for words in SAID[name]:
        assert words in body, words
    hero = body.partition('class="hero"')[2].partition("</section>")[0]
    assert ('class="text passage"' in hero) == (name == "router_and_token"), "a token is shown where one is accused"
    assert not re.search(r"\bNone\b|\bnan\b", body)


def test_lists_and_lines_name_the_step_s_cause(events, tmp_path):
    for name, event in events.items():
        event["event_id"], event["folder"] = name, None
    run = read_run(write_run(tmp_path, list(events.values()), metrics=make_metrics(30)))
    causes_told = [row["cause"] for row in csv.DictReader(io.StringIO(to_csv(run, run.events)))]
    assert causes_told[:2] == ["non_finite_weights", "non_finite_padding"] and causes_told[-1] == ""
    text = page.render(run)
    for cause in ("non finite weights", "non finite padding", "batch scale", "transient", "not tokens", "entropy term"):
        assert f'"cause":"{cause}"' in text
    line = announcement(read(Event, events["weights"]))
    assert line == (
        "Weights that are not finite broke step 412; no token did: 2 parameters hold weights that are not finite, "
        "norm NaN, taken: observe"
    )
