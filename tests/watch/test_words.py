# SPDX-License-Identifier: Apache-2.0
"""What an event says of a loop without advantages: a loss weight, a document, a label; and why, with evidence."""

import copy
import json
import math

import pytest
import torch

import gradloc
from gradloc import token_log_probs
from gradloc.explain.next_step import next_step
from gradloc.record import Event
from gradloc.record.reading import read
from tests.toy_model.model import build
from tests.world import DEVICE
from tests.world.events import events_in, named

R, S = 8, 17


class Letters:
    """Token n is a letter; 0 is padding."""

    pad_token_id = 0

    def decode(self, ids, **_):
        return "".join(chr(97 + number % 26) + (" " if number % 5 == 0 else "") for number in ids)


def counting(step):
    """Documents that count, each from its own number: a model learns them soon."""
    starts = torch.randint(1, 60, (R, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(S)).to(DEVICE), torch.ones(R, S - 1, device=DEVICE)


def log_probs_of(model, ids):
    return token_log_probs(model(ids[:, :-1], S - 1), ids[:, 1:])


@pytest.fixture(scope="module")
def trained():
    model = build("tiny")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        ids, mask = counting(step)
        optimizer.zero_grad()
        loss = -(log_probs_of(model, ids) * mask).mean()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.05
    return model


def event_of(trained, folder, change, tokenizer=None):
    """The event of one step whose ids, labels, mask or weights are changed."""
    model = copy.deepcopy(trained)
    watch = gradloc.Watch(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), folder, tokenizer=tokenizer or Letters(), trigger=TAU
    )
    ids, mask = counting(999)
    made = {"ids": ids, "labels": ids[:, 1:].clone(), "mask": mask, "weights": mask.clone()}
    change(made)
    for rows in torch.arange(R).split(4):
        x, labels, kept = made["ids"][rows, :-1], made["labels"][rows], made["mask"][rows]
        found = watch.log_probs(
            lambda: token_log_probs(model(x, S - 1), labels),  # noqa: B023 (it keeps what x is now)
            kept,
            labels,
            rows=[f"document {row}" for row in rows.tolist()],
        )
        (-(found * made["weights"][rows] * kept).sum() / made["mask"].sum()).backward()
    watch.clip_grad_norm_(1.0)
    (event,) = events_in(folder)
    return event


TAU = {"tau": 1.0}


def unexpected(made):
    made["labels"][3, 7] = 90


def garbled(made):
    made["ids"][5] = torch.randint(61, 96, (S,), generator=torch.Generator().manual_seed(5))
    made["labels"][5] = made["ids"][5, 1:]


def twice(made):
    garbled(made)
    for row in (1, 2):
        made["ids"][row], made["labels"][row] = made["ids"][5], made["labels"][5]


def shifted(made):
    made["labels"][2] = made["ids"][2, :-1]


def padded(made):
    made["ids"][4, 9:] = 0
    made["labels"][4, 8:] = 0


def heavy(made):
    made["weights"][6, 3] = 1e5


@pytest.mark.parametrize(
    "change, label, row, said",
    [
        (heavy, "loss_weight", 6, "Its weight in the loss is out of line: 100,000 times the typical size."),
        (unexpected, "unexpected_token", 3, "The model gives the token a probability of"),
        (garbled, "odd_document", 5, "Its mean log-prob is"),
        (twice, "duplicate_document", 5, "2 other rows of the batch's 8 are the same."),
        (shifted, "shifted_labels", 2, "moved by one they have"),
        (padded, "padding_trained", 4, "The row ends in 8 equal tokens that the mask has in the loss."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_cause_is_named_with_its_evidence(trained, tmp_path, change, label, row, said):
    event = event_of(trained, tmp_path, change)
    assert event["cause"]["label"] == label and said in event["verdict"]
    assert row in {place for place, _ in named(event)}
    assert "advantage" not in event["verdict"] and "response" not in event["verdict"]
    assert event["run"]["trainer"] == "loop" and f"document {row}" in {c["sequence_id"] for c in event["culprits"]}
    step = next_step(read(Event, event))
    told = f"{step.do} {step.why} {step.check} {' '.join(step.lines.values())}"
    assert "actor_rollout_ref" not in told and "reward" not in told and "None" not in told


def test_a_token_s_rank_and_probability_are_those_of_the_model(trained, tmp_path):
    event = event_of(trained, tmp_path, unexpected)
    ids, _ = counting(999)
    logits = trained(ids[3:4, :-1], S - 1)[0, 7]
    numbers = event["culprits"][0]["cause"]["numbers"]
    assert numbers["document_rank"] == int((logits > logits[90]).sum())
    assert math.isclose(numbers["probability"], float(logits.softmax(-1)[90]), rel_tol=1e-3)
    assert f"behind {numbers['document_rank']:.0f} others" in event["verdict"]


def test_nan_in_a_weight_is_a_loss_without_a_finite_gradient(trained, tmp_path):
    event = event_of(trained, tmp_path, lambda made: made["weights"][6, 3].fill_(math.nan))
    assert named(event) == [(6, 3)] and event["cause"]["label"] == "non_finite"
    assert "verl" not in json.dumps(event["verdict"])
