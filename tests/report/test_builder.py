# SPDX-License-Identifier: Apache-2.0
"""The runs that these tests build are runs that the trainer could have written."""

import pytest

from tests.report.builder import HOSTILE, make_culprit, make_event, make_sequence
from tests.world.events import validate


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("event", make_event()),
        ("event", make_event(culprits=[], shares=None, folder=None)),
        ("event", make_event(culprits=[make_culprit(share=None, advantage="NaN")])),
        ("sequences", {"schema_version": 1, "event_id": "e", "sequences": [make_sequence(tokens=HOSTILE)]}),
        ("event", make_event(culprits=[make_culprit(tokens=None, text_before=None)])),
        (
            "sequences",
            {
                "schema_version": 1,
                "event_id": "e",
                "sequences": [make_sequence(token_ids=None) | {"tokens": None, "prompt": None}],
            },
        ),
    ],
)
def test_a_built_record_keeps_the_schema(name, record):
    validate(name, record)
