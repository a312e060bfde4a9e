# SPDX-License-Identifier: Apache-2.0
"""A record is read as it was written, and what is wrong is said with its place."""

import json
import math
from pathlib import Path

import pytest

from gradloc.record import Event
from gradloc.record.bundle import BundleMeta, Sequence, SequenceFile
from gradloc.record.reading import read
from gradloc.record.store import plain

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "gradloc"


def documents():
    event = json.loads((DEMO / "events.jsonl").read_text().splitlines()[0])
    yield Event, event
    for name, kind in (("sequences", SequenceFile), ("meta", BundleMeta)):
        yield kind, json.loads((DEMO / event["folder"] / f"{name}.json").read_text())


@pytest.mark.parametrize(("kind", "raw"), list(documents()))
def test_it_is_written_as_it_was_read(kind, raw):
    _is_among(raw, plain(read(kind, raw)))


def _is_among(old, new):
    """The example is older than a field or two."""
    if isinstance(old, dict):
        for name in old:
            _is_among(old[name], new[name])
    elif isinstance(old, list):
        assert len(old) == len(new)
        for item, other in zip(old, new, strict=True):
            _is_among(item, other)
    else:
        assert old == new


def test_what_is_missing_takes_its_default_and_what_is_not_known_is_passed_over():
    found = read(Event, {"trigger": {"grad_norm": "Infinity"}, "shares": {"closure": 1.0}, "of": "new", "cures": [{}]})
    assert found.trigger.grad_norm == math.inf and found.shares.is_trusted
    assert (found.culprits, found.search.strategy) == ((), "unknown")
    assert not found.is_distilled and found.cures[0].changed_tokens == 0.0
    assert read(Event, json.loads(json.dumps(plain(Event())))) == read(Event, {}) == Event()


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ([], "the file must be an object, found []"),
        ({"step": []}, "step must be an object, found []"),
        ({"step": {"epoch": True}}, "step.epoch must be an integer, found True"),
        ({"trigger": {"tau": "1e3"}}, "trigger.tau must be a number, found '1e3'"),
        ({"culprits": {}}, "culprits must be a list, found {}"),
        ({"culprits": [{"positions": [1, "2"]}]}, "culprits[0].positions[1] must be an integer, found '2'"),
        ({"culprits": [{"is_exact": 1}]}, "culprits[0].is_exact must be true or false, found 1"),
        ({"search": {"path": [{"ranks": [0]}]}}, "search.path[0].ranks must be a list of 2, found [0]"),
        ({"layers": {"head": None}}, "layers.head must be a number, found None"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(raw, sentence):
    with pytest.raises(ValueError) as caught:
        read(Event, raw)
    assert str(caught.value).endswith(sentence)


def test_a_field_that_a_replay_needs_is_named_when_it_is_missing():
    with pytest.raises(ValueError, match="temperature is missing"):
        read(BundleMeta, {"actor": {}, "on_policy": True, "layout": [], "event": {}})


def test_a_sequence_is_as_long_as_what_is_known_of_it_and_its_tokens_can_be_told_apart():
    assert len(Sequence()) == 0 and Sequence().ids == ()
    assert len(Sequence(token_ids=(7, 8), columns={"share": (0.5, 0.25, 0.25)})) == 3
    assert Sequence(token_ids=(7, 8), columns={"log_prob": (-1.0,) * 4}).ids == (7, 8, -3, -4)
    assert Sequence(columns={"share": (0.5, 0.5)}).ids == (-1, -2)
