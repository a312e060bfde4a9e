# SPDX-License-Identifier: Apache-2.0
"""The table of docs/losses.md is what verl 0.9's own losses do."""

from lab.benchmarks.losses import markdown
from tests.benchmarks.test_losses import PAGE


def test_the_page_has_what_the_command_prints():
    assert markdown() in PAGE
