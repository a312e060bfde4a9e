# SPDX-License-Identifier: Apache-2.0
"""Other trainers: DeepSpeed and Megatron where this process' environment has them, the others by their own commands."""

import os
from importlib.util import find_spec

collect_ignore = [f"test_{package}.py" for package in ("deepspeed", "megatron") if find_spec(package) is None]
if not os.environ.get("GRADLOC_TRAINERS"):  # scripts/test.sh sets it: each needs an environment of its own
    collect_ignore.append("test_commands.py")
