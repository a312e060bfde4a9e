# SPDX-License-Identifier: Apache-2.0
from tests.adapters.verl07.layouts.test_ulysses import *  # noqa: F403
