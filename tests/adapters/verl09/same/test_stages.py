# SPDX-License-Identifier: Apache-2.0
from tests.reweighting.test_stages import *  # noqa: F403
