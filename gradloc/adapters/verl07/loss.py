# SPDX-License-Identifier: Apache-2.0
"""verl's own loss of one micro-batch, of given log-probs: its ``update_policy`` runs, and the forward gives these."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ...touched import replaced
from ..verl_common.losses import changed


class Forwarded(dict):
    """What verl's ``_forward_micro_batch`` returns: a dict in 0.7.1, a pair of entropy and log-prob in 0.7.0."""

    def __iter__(self) -> Any:
        return iter((self["entropys"], self["log_probs"]))


def forwarded(found: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob and entropy of what either release returns."""
    if isinstance(found, dict):
        return found["log_probs"], found.get("entropys")
    return found[1], found[0]


def own_loss(
    actor: Any,
    inputs: Mapping[str, Any],
    log_prob: torch.Tensor,
    entropy: torch.Tensor | None,
    settings: Mapping[str, Any],
) -> torch.Tensor:
    """The loss that verl would run backward from, unscaled (fp16), a scalar; nothing of the actor's is changed.

    Args:
        actor: verl's ``DataParallelPPOActor``, in training mode.
        inputs: of the micro-batch, as the loss takes them; ``old_log_probs`` are used as they are.
        log_prob: (B, T), with a graph or not.
        entropy: (B, T); None where the loss does not ask for it.
        settings: of the actor's config, in place of its own.
    """
    from verl.workers.actor import dp_actor  # which imports the adapter

    kept, given = _Kept(), Forwarded(log_probs=log_prob, entropys=entropy)
    config = changed(actor.config, use_rollout_log_probs=True, ppo_epochs=1, **settings)
    instead = {
        "config": config,
        "scaler": kept,
        "gradloc": _Aside(actor.gradloc),
        "actor_optimizer": SimpleNamespace(zero_grad=lambda: None),
        "gradient_accumulation": 1,  # which verl sets again
        "_forward_micro_batch": lambda *_, **__: given,
        "_optimizer_step": lambda: torch.zeros(()),
    }
    one = {"prepare_dynamic_batch": lambda micro_batch, **_: ([micro_batch], None)}
    with replaced(actor, **instead), replaced(dp_actor, **one):
        actor.update_policy(_MicroBatch(inputs))
    return kept.loss


class _Kept:
    """In the scaler's place: keeps the loss, and runs no backward."""

    loss: torch.Tensor

    def scale(self, loss: torch.Tensor) -> "_Kept":
        self.loss = loss
        return self

    def backward(self) -> None:
        pass


class _MicroBatch:
    """verl's DataProto with one micro-batch, which is its only mini-batch, too."""

    def __init__(self, inputs: Mapping[str, Any]):
        self.batch, self.non_tensor_batch, self.meta_info = inputs, {}, {"temperature": 1.0}

    def select(self, **_: Any) -> "_MicroBatch":
        return self

    def split(self, _: int) -> "list[_MicroBatch]":
        return [self]

    def to(self, _: Any) -> "_MicroBatch":
        return self


class _Aside:
    """In the hook's place: the loss is what it makes of it, and nothing is recorded."""

    is_stage = False

    def __init__(self, hook: Any):
        self.in_stage, self._hook = hook.in_stage, hook

    def token_weights(self, model_inputs: Any, log_prob: torch.Tensor, given: Any, _: Any) -> torch.Tensor | None:
        return self._hook.token_weights(model_inputs, log_prob.detach(), given, {})

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []
