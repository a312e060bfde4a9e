# SPDX-License-Identifier: Apache-2.0
"""The worlds of tests/gradloc, for scenarios of this folder."""

from tests.gradloc.conftest import (  # noqa: F401
    dump_dir,
    four_ranks,
    single,
    unpatched_world,
    world,
)
from tests.gradloc.test_config import compose  # noqa: F401
