# SPDX-License-Identifier: Apache-2.0
from tests.verl_actor.layouts.test_turns import *  # noqa: F403
