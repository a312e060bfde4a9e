# SPDX-License-Identifier: Apache-2.0
"""An event that cannot be written is counted and told, and training goes on."""

import logging
from types import SimpleNamespace

import pytest

from gradloc.loop.writer import EventWriter
from tests.report.builder import make_event


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("odd")], ids=lambda e: type(e).__name__
)
def test_only_what_is_not_known_of_disks_comes_with_its_traceback(error, caplog, monkeypatch):
    def fail(*_):
        raise error

    writer = EventWriter.__new__(EventWriter)
    writer.num_failures, writer.store = 2, SimpleNamespace(root="there")
    monkeypatch.setattr(writer, "_complete", fail)
    event = SimpleNamespace(step=SimpleNamespace(**make_event()["step"]))
    with caplog.at_level(logging.ERROR):
        found, why = writer.write(SimpleNamespace(event=event), None, {})
    (record,) = caplog.records
    assert found is event and why and writer.num_failures == 3 and "to there failed" in record.getMessage()
    assert bool(record.exc_info) == isinstance(error, ValueError)
