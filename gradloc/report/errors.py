# SPDX-License-Identifier: Apache-2.0
"""The one error that ends a command: a sentence that the CLI prints without a traceback."""


class ReportError(Exception):
    """Says in one sentence what is wrong and what to do."""
