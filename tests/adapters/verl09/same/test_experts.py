# SPDX-License-Identifier: Apache-2.0
from tests.adapters.verl07.layouts.test_experts import *  # noqa: F403
