# SPDX-License-Identifier: Apache-2.0
from tests.adapters.verl07.test_cures import *  # noqa: F403
