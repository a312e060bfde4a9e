# SPDX-License-Identifier: Apache-2.0
"""What a command prints or refuses; browser tests run when they are asked for by name, here too."""

from tests.report.conftest import pytest_collection_modifyitems, refused, shown  # noqa: F401
