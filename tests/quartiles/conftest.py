# SPDX-License-Identifier: Apache-2.0
"""The worlds of tests/gradloc, for scenarios of this folder."""

from tests.gradloc.conftest import dump_dir, single, world  # noqa: F401
