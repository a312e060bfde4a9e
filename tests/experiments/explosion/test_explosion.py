# SPDX-License-Identifier: Apache-2.0
"""The explosion itself: two arms of it on the real trainer, its token, its table."""

import pytest

from .short import explode


@pytest.mark.e2e
@pytest.mark.slow
def test_the_stale_token_explodes_is_named_and_is_compared_with_the_healthy_twin(patched_tree, tmp_path):
    explode(tmp_path / "suite", VERL_REPO=str(patched_tree))
