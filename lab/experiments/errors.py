# SPDX-License-Identifier: Apache-2.0
"""Errors of an experiment: one sentence each, printed by `cli.main`."""


class ExperimentError(Exception):
    """Something outside this repository prevents the run."""

    exit_code = 1


class UsageError(ExperimentError):
    """The command line asks for something that does not exist."""

    exit_code = 2
