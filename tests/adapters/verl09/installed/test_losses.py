# SPDX-License-Identifier: Apache-2.0
"""The table of docs/losses.md is what verl 0.9's own losses do."""

from lab.benchmarks.losses import rows
from tests.benchmarks.test_losses import PAGE


def test_the_page_has_what_the_command_prints():
    assert "\n".join(rows()) in PAGE
