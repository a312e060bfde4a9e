# SPDX-License-Identifier: Apache-2.0
from tests.verl_actor.layouts.test_kernels import *  # noqa: F403
