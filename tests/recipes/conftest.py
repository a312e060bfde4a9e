# SPDX-License-Identifier: Apache-2.0
"""Other trainers: DeepSpeed or Megatron where this process' environment has one, the others by their own commands."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.world import World

PACKAGE = next(filter(find_spec, ("deepspeed", "megatron")), "")
LOOPS = {
    "deepspeed": ("zero", ("deepspeed", "transformers.models.llama.modeling_llama")),
    "megatron": ("megatron", ("megatron.core.optimizer", "megatron.core.models.gpt")),
}
"""The module of each package's loop, and what its ranks import first."""
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "": [],
    "deepspeed": [{"stage": stage, "dtype": dtype} for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")],
    "megatron": [
        {"dtype": dtype, "is_distributed": is_distributed}
        for dtype in ("float32", "bfloat16")
        for is_distributed in (False, True)
    ],
}
collect_ignore = [f"test_{package}.py" for package in LOOPS if package != PACKAGE] + ["test_ranks.py"] * (not PACKAGE)
if not os.environ.get("GRADLOC_TRAINERS"):  # scripts/test.sh sets it: each needs an environment of its own
    collect_ignore.append("test_commands.py")


@pytest.fixture(scope="session")
def train() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``train(...)``: the package's loop on two ranks, :func:`.zero.train` or :func:`.megatron.train`."""
    module, preloaded = LOOPS[PACKAGE]
    with World(2, preloaded=preloaded, timeout_s=600) as world:
        yield lambda name="train", **given: world.run(f"tests.recipes.{module}.{name}", **given)
