# SPDX-License-Identifier: Apache-2.0
from tests.verl_actor.test_trigger import *  # noqa: F403
