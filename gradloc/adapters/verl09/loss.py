# SPDX-License-Identifier: Apache-2.0
"""verl's loss of the actor with our parts around it: weights on its tokens, and one stage of Lopti's.

Shapes: B rows of the micro-batch, T response positions.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from ...reweighting.stages import STAGE_MASK_KEY
from ...stabilize.ratio_clip import TokenWeigher
from ...touched import replaced
from .packed import pack, padded, scaled

_RATIO_FIELDS = ("rollout_log_probs", "response_mask")
_WEIGHTS = "rollout_is_weights"
"""What verl multiplies the token losses with."""


def weighed(loss_function: partial, weigher: TokenWeigher, note: Callable[[Mapping[str, float]], Any]) -> partial:
    """verl's ``ppo_loss``, the actor's config bound to it, with tokens that count as the clips on ratios say; ``note``
    is told what these did with a micro-batch."""
    return partial(_weighed_loss, loss_function.func, weigher, note, **loss_function.keywords)


def _weighed_loss(
    of_verl: Callable,
    weigher: TokenWeigher,
    note: Callable[[Mapping[str, float]], Any],
    *,
    model_output: Mapping[str, torch.Tensor],
    data: Any,
    **given: Any,
) -> tuple[torch.Tensor, dict]:
    metrics: dict[str, float] = {}
    inputs = {name: padded(data[name]) for name in _RATIO_FIELDS if name in data.keys()}
    log_prob = no_padding_2_padding(model_output["log_probs"].detach(), data)
    before = padded(data[_WEIGHTS]) if _WEIGHTS in data.keys() else None
    weights = weigher.token_weights(inputs, log_prob, before, metrics)
    note(metrics)
    data = data.copy()
    data[_WEIGHTS] = response_to_nested(weights, data["response_mask"])
    return of_verl(model_output=model_output, data=data, **given)


def within_stage(loss_function: partial) -> partial:
    """A loss whose KL and entropy terms are of the stage's tokens alone; denominators stay those of all tokens."""
    return partial(_loss_of_stage, loss_function.func, *loss_function.args, **loss_function.keywords)


def _loss_of_stage(
    of_verl: Callable, *args: Any, model_output: Mapping[str, torch.Tensor], data: Any, **given: Any
) -> tuple[torch.Tensor, dict]:
    mask = padded(data[STAGE_MASK_KEY])
    output = dict(model_output)
    if output.get("entropy") is not None:
        output["entropy"] = scaled(output["entropy"], pack(mask, data))
    # verl's loss has the KL of its tokens from a function of this name, and nothing between it and the mean
    of_tokens = losses.kl_penalty
    with replaced(losses, kl_penalty=lambda *args, **given: of_tokens(*args, **given) * mask):
        return of_verl(*args, model_output=output, data=data, **given)
