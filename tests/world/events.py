# SPDX-License-Identifier: Apache-2.0
"""Read what a run wrote, and hold it against the published schemas."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).resolve().parents[2] / "schema"


def read_events(dump_dir: str | Path) -> list[dict[str, Any]]:
    """All events of a folder, each validated, with the documents of its folder; none without the folder."""
    root, path = Path(dump_dir), Path(dump_dir, "events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for event in events:
        validate("event", event)
        if event["folder"] is not None:
            folder = root / event["folder"]
            validate("sequences", json.loads((folder / "sequences.json").read_text()))
            if (folder / "meta.json").exists():
                validate("bundle", json.loads((folder / "meta.json").read_text()))
                assert (folder / "batch.safetensors").stat().st_size > 0
    return events


def events_in(run: str | Path) -> list[dict[str, Any]]:
    """All events of a run outside of verl, each validated."""
    return read_events(Path(run, "gradloc"))


def named(event: dict[str, Any]) -> list[tuple[int, int]]:
    """Row and position of every token that is named."""
    return [(culprit["row"], position) for culprit in event["culprits"] for position in culprit["positions"]]


def validate(name: str, document: dict[str, Any]) -> None:
    """Raise when a document does not follow its published schema."""
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(document))
    if error is not None:
        raise error


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    """That it is one, tests/record/test_schemas.py holds: to look again takes most of a second."""
    (path,) = SCHEMAS.glob(f"{name}.v*.schema.json")
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))
