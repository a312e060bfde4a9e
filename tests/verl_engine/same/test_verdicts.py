# SPDX-License-Identifier: Apache-2.0
from tests.verl_actor.test_verdicts import *  # noqa: F403
