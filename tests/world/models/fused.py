# SPDX-License-Identifier: Apache-2.0
"""Kernels, which verl switches on for a class of models: here for one model of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch


@contextmanager
def for_one_model() -> Iterator[None]:
    """Whatever verl makes of a model's class in here, it makes of a class that this model alone has."""
    from verl.models.transformers import monkey_patch

    original = monkey_patch.patch_forward_with_backends

    def patch_forward_with_backends(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        own = type(model)
        model.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})
        original(model, *args, **kwargs)

    with mock.patch.object(monkey_patch, "patch_forward_with_backends", patch_forward_with_backends):
        yield


def use_kernels(model: torch.nn.Module, settings: Any) -> None:
    """As verl 0.7's worker does; ``settings`` is the config's ``actor_rollout_ref.model``."""
    from verl.models.transformers import monkey_patch

    if settings.use_liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if settings.use_fused_kernels:
        with for_one_model():
            backend = settings.fused_kernel_options.impl_backend
            monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)


def with_liger(scenario: str, **given: Any) -> Any:
    """A scenario of tests.world under Liger's kernels on triton's interpreter; the oracle's model is without them."""
    from liger_kernel.ops import rms_norm
    from transformers.models.qwen3 import modeling_qwen3
    from triton import language
    from triton.runtime import interpreter

    from tests.world import harness, spikes

    assert os.environ["TRITON_INTERPRET"] == "1"
    rms_norm.rsqrt = lambda x: language.math.rsqrt(x)  # the interpreter has no function of a device's library
    convert = interpreter._implicit_cvt

    def with_floats(arg: Any) -> Any:
        """A float in float32, as a compiled kernel has it; the interpreter leaves it a number of Python's."""
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    module, function = scenario.split(".")
    scenarios, names = import_module(f"tests.world.{module}"), vars(modeling_qwen3)
    plain, make_trainer, oracle_of = dict(names), scenarios.make_trainer, spikes.Oracle

    def make_with_liger(*args: Any, **settings: Any) -> Any:
        names.update(plain)  # Liger replaces classes, too, and so would build the next model of this process otherwise
        return make_trainer(*args, **settings)

    def of_a_plain_model(trainer: Any, model: torch.nn.Module, batch: Any) -> Any:
        assert "Liger" in type(trainer.module.model.norm).__name__ + str(trainer.module.model.norm)
        with mock.patch.dict(names, plain):
            return oracle_of(trainer, harness.make_model(), batch)

    oracle = mock.patch.object(spikes, "Oracle", of_a_plain_model)
    floats = mock.patch.object(interpreter, "_implicit_cvt", with_floats)
    with mock.patch.dict(names), mock.patch.object(scenarios, "make_trainer", make_with_liger), oracle, floats:
        return getattr(scenarios, function)(**given)
