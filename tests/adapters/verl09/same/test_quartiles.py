# SPDX-License-Identifier: Apache-2.0
from tests.analysis.quartiles.test_actor import *  # noqa: F403
