# SPDX-License-Identifier: Apache-2.0
"""Find the layer and the kind of module of a parameter by its name, and add norms up by them.

FSDP1 without original parameters merges all parameters of a wrapped unit into one flat parameter, whose name still has
the layer; its kind is ``mixed``.
"""

import functools
import re
from collections.abc import Callable

import torch

from ..core.gradients import GradientSpace
from ..record import LayerHistory

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(?:_\w+\.)*(\d+)(?:\.|$)")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_\w+)\.")
_KINDS = (
    ("head", ("lm_head", "output_layer", "score")),
    ("embedding", ("embed", "wte", "wpe")),
    ("norm", ("norm", "ln_")),  # before attention: post_attention_layernorm is a norm
    ("attention", ("attn", "attention")),
    ("mlp", ("mlp", "feed_forward", "experts")),
)


def layer_of(name: str) -> str:
    """Return ``layer N``, ``vision layer N`` for a block that reads pictures, or a kind for a parameter of no block.

    >>> layer_of("model.layers.3.mlp.up_proj.weight")
    'layer 3'
    >>> layer_of("model.embed_tokens.weight")
    'embedding'
    """
    found = _LAYER.search(name)
    if found is None:
        return kind_of(name)
    return f"{'vision ' if _VISION.search(name) else ''}layer {found[1]}"


@functools.cache  # called at every step
def kind_of(name: str) -> str:
    """Return ``embedding``, ``attention``, ``mlp``, ``norm``, ``head``, ``vision``, ``mixed`` or ``other``.

    >>> kind_of("model.layers.3.post_attention_layernorm.weight")
    'norm'
    """
    if name.endswith("_flat_param"):
        return "mixed"
    if _VISION.search(name):
        return "vision"
    module = name.rsplit(".", 2)[-2] if "." in name else name
    for part in (module, name):  # the name of the parameter's own module comes first
        for kind, marks in _KINDS:
            if any(mark in part for mark in marks):
                return kind
    return "other"


def names_for_layers(space: GradientSpace) -> list[str]:
    """Return the parameters' names, ``lm_head`` for one that only the trainer knows to be a head's."""
    return ["lm_head" if name in space.heads and layer_of(name) == "other" else name for name in space.names]


@torch.no_grad()
def head_square(space: GradientSpace) -> torch.Tensor:
    """Return this rank's part of the squared gradient norm of the output head, or of the embedding where both are tied.

    A scalar, read off ``.grad`` without communication; the parts of all processes add up. The head's gradient norm
    is a lower bound on how far a step moves the policy, and surges where training degrades (arXiv 2605.19425).
    Negative where neither the trainer nor a parameter's name says which is the head.
    """
    norms: dict[str, list[torch.Tensor]] = {"head": [], "embedding": []}
    zero = torch.zeros((), dtype=torch.float64, device=space.params[0].device)
    for name, shard in space.named_shards():
        kind = "head" if name in space.heads else kind_of(name)
        if kind in norms:
            norms[kind].append(zero if shard is None else torch.linalg.vector_norm(shard, dtype=torch.float64))
    kept = norms["head"] or norms["embedding"]
    if not kept:  # a frozen head has no gradient
        return zero if _has_head(space) else zero - 1.0
    return torch.linalg.vector_norm(torch.stack(kept)).square() / space.num_replicas


def _has_head(space: GradientSpace) -> bool:
    """Return whether some parameter is a head's or an embedding's by its name, trained or not."""
    return any(kind_of(name) in ("head", "embedding") for name, _ in space.module.named_parameters())


def norms_by(group: Callable[[str], str], names: list[str], squares: torch.Tensor) -> dict[str, float]:
    """Add squared norms up by group and take the root.

    Args:
        group: ``layer_of`` or ``kind_of``.
        names: parameter names (num_params).
        squares: squared norms, float64 (num_params,).

    Returns:
        Norm per group, in the order in which the groups first appear.
    """
    sums: dict[str, float] = {}
    for name, square in zip(names, squares.tolist(), strict=True):
        sums[group(name)] = sums.get(group(name), 0.0) + square
    return {key: value**0.5 for key, value in sums.items()}


def layer_history(names: list[str], squares: torch.Tensor, history: torch.Tensor | None) -> LayerHistory | None:
    """Compare each layer's norm with its own median, and with how the layers moved together before.

    This is GradLoc's layerwise heterogeneity: ``spread``, the largest layer's excess over the median layer's, and the
    mean correlation over time of the layers' log-norms.
    """
    if history is None:
        return None
    layers = norms_by(layer_of, names, squares)
    now = torch.tensor(list(layers.values()), dtype=torch.float64)
    norms = torch.tensor([list(norms_by(layer_of, names, row).values()) for row in history], dtype=now.dtype)
    medians = norms.median(0).values  # norms: (steps, layers)
    excess = torch.where(medians > 0, now / medians, torch.ones_like(now))
    correlation = torch.corrcoef(norms.clamp(min=1e-30).log().T).nan_to_num(nan=1.0)
    num_layers = len(now)
    num_pairs = num_layers * (num_layers - 1)
    return LayerHistory(
        num_steps=len(norms),
        excess=dict(zip(layers, excess.tolist(), strict=True)),
        spread=float(excess.max() / excess.median().clamp(min=1e-30)),
        mean_correlation=float((correlation.sum() - num_layers) / num_pairs) if num_pairs else 1.0,
    )
