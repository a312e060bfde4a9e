# SPDX-License-Identifier: Apache-2.0
from tests.verl_actor.test_layouts import *  # noqa: F403
