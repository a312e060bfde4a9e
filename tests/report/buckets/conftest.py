# SPDX-License-Identifier: Apache-2.0
"""Small figures: drawing is most of the time here."""

import pytest


@pytest.fixture(autouse=True)
def small_figures(monkeypatch):
    monkeypatch.setattr("gradloc.report.commands.buckets.DPI", 40)
