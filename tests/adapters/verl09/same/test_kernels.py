# SPDX-License-Identifier: Apache-2.0
from tests.adapters.verl07.layouts.test_kernels import *  # noqa: F403
