# SPDX-License-Identifier: Apache-2.0
"""The worlds of tests/gradloc, for scenarios of this folder."""

from tests.gradloc.conftest import dump_dir, single, unpatched_world, world  # noqa: F401
from tests.gradloc.test_config import compose  # noqa: F401
