# SPDX-License-Identifier: Apache-2.0
"""An event that cannot be written is counted and told, and training goes on."""

import logging
from types import SimpleNamespace

import pytest

from gradloc.core.ranks import Ranks
from gradloc.loop.writer import EventWriter, events_weights_folder
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


@pytest.mark.parametrize(
    ("checkpoint", "max_gb", "is_kept"),
    [("before_step", 1e-9, True), ("before_step", 0.0, False), ("off", 20.0, False)],
)
def test_weights_are_kept_where_that_is_asked_for_and_the_folder_is_not_full(checkpoint, max_gb, is_kept, tmp_path):
    evidence = SimpleNamespace(checkpoint=checkpoint, max_gb=max_gb)
    found = events_weights_folder(SimpleNamespace(evidence=evidence, root=str(tmp_path)), 7, Ranks())
    assert (found is not None) == is_kept and (found is None or found.startswith(str(tmp_path)))
