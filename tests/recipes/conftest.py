# SPDX-License-Identifier: Apache-2.0
"""Other trainers, `make test-trainers`: DeepSpeed in this process' environment, the others by their own commands."""

import os
from importlib.util import find_spec

collect_ignore = []
if find_spec("deepspeed") is None:
    collect_ignore.append("test_deepspeed.py")
if not os.environ.get("GRADLOC_TRAINERS"):  # scripts/test.sh sets it: each needs an environment of its own
    collect_ignore.append("test_commands.py")
