# SPDX-License-Identifier: Apache-2.0
from tests.analysis.test_split import *  # noqa: F403
