# SPDX-License-Identifier: Apache-2.0
"""The published schemas are those of the dataclasses, and the published example keeps them."""

import json
from pathlib import Path

import jsonschema
import pytest

from gradloc.record.columns import COLUMNS
from scripts.make_schemas import FILES, page, schema_of, text_of
from tests.world.events import read_events, validate

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "examples" / "demo" / "gradloc"


def file_of(name: str) -> str:
    return f"{name}.v{FILES[name].schema_version}.schema.json"


def committed(name: str) -> str:
    return (REPO / "schema" / file_of(name)).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_what_its_dataclass_says(name):
    assert text_of(schema_of(FILES[name])) == committed(name), "run python scripts/make_schemas.py"
    jsonschema.Draft202012Validator.check_schema(json.loads(committed(name)))


def test_the_page_has_every_column():
    path, text = page()
    assert path.read_text(encoding="utf-8") == text, "run python scripts/make_schemas.py"
    assert all(f"\n| `{name}` | {column.label} |" in text for name, column in COLUMNS.items())


def test_no_schema_is_written_by_hand():
    assert {path.name for path in (REPO / "schema").iterdir()} == {file_of(name) for name in FILES}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda event: event.pop("trigger"), "'trigger' is a required property"),
        (lambda event: event["culprits"][0].update(rank=None), "None is not of type 'integer'"),
        (lambda event: event["culprits"][0].update(cause={"label": "?", "numbers": {}}), "'?' is not one of"),
        (lambda event: event["step"].update(epochs=1), "'epochs' was unexpected"),
        (lambda event: event["search"].update(seconds="soon"), "'soon' is not valid"),
    ],
)
def test_an_event_that_is_not_of_the_schema_is_told(change, why):
    event = json.loads((DEMO / "events.jsonl").read_text().splitlines()[0])
    validate("event", event)
    change(event)
    with pytest.raises(jsonschema.ValidationError, match=why.replace("?", r"\?")):
        validate("event", event)


def test_the_example_keeps_the_schemas():
    assert read_events(DEMO)
