# SPDX-License-Identifier: Apache-2.0
"""The worlds of gloo ranks that the localizer's tests use."""

from tests.gradloc.conftest import dump_dir, unpatched_world, world  # noqa: F401
