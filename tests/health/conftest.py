# SPDX-License-Identifier: Apache-2.0
"""What a command prints or refuses."""

from tests.report.conftest import refused, shown  # noqa: F401
