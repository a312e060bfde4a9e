# SPDX-License-Identifier: Apache-2.0
"""Fused kernels, which verl switches on for a class of models: here for one model of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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


def use_fused_kernels(model: torch.nn.Module, settings: Any) -> None:
    """As verl 0.7's worker does; ``settings`` is the config's ``actor_rollout_ref.model``."""
    from verl.models.transformers import monkey_patch

    if settings.use_fused_kernels:
        with for_one_model():
            backend = settings.fused_kernel_options.impl_backend
            monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
