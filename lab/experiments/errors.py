# SPDX-License-Identifier: Apache-2.0
"""Why an experiment cannot run: one sentence each, printed in one place (`cli.main`)."""


class ExperimentError(Exception):
    """Something outside this repository is not as it has to be."""

    exit_code = 1


class UsageError(ExperimentError):
    """The command line asks for something that does not exist."""

    exit_code = 2
