# SPDX-License-Identifier: Apache-2.0
"""Browser tests run when they are asked for by name, here too."""

from tests.report.conftest import pytest_collection_modifyitems  # noqa: F401
