# SPDX-License-Identifier: Apache-2.0
"""Browser tests run when they are asked for by name, and never by the way."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "browser" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="opens a browser: run `pytest -m browser`")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(skip)
