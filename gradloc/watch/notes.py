# SPDX-License-Identifier: Apache-2.0
"""Optional calls by which a loop says more: its last forward's tokens, rows, log-probs, advantages; Lopti's stages.

Shapes: B rows of a micro-batch, T positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..checks import require
from ..core.step import Outputs
from ..loop.batch import at_first
from .forwarded import Forward, StageTokens, frozen, outputs_of
from .taps import ModelTap


class Notes:
    """The methods of a watch by which a loop says more."""

    tap: ModelTap
    localizer: Any
    stage_name: str
    """The name of Lopti's stage that the present step is of; empty for an ordinary step."""
    _next_number: int | None

    def note(
        self,
        *,
        mask: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        rows: Sequence[Any] | None = None,
        log_probs: torch.Tensor | None = None,
        old_log_probs: torch.Tensor | None = None,
        advantages: torch.Tensor | None = None,
        rewards: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        step: int | None = None,
    ) -> None:
        """Add to the event's record what the loop knows about the last forward. All of it is optional.

        Args:
            mask: (B, T), true or 1 where a token is trained on; default: where dL/dh is not 0.
            ids: (B, T) the tokens that these positions predict; given together with ``mask``.
            rows: names of the documents or rollouts; equal ones are of one prompt.
            log_probs: (B, T), as the loss takes them.
            old_log_probs: (B, T), as the loss takes them.
            advantages: (B, T) or (B,).
            rewards: (B,).
            weights: (B, T) or (B,), how much a token weighs in the step's loss.
            step: the trainer's number of the step that is being made.

        Raises:
            ValueError: one sentence, where shapes do not fit.
        """
        if self.localizer is None:
            return
        self._next_number = self._next_number if step is None else int(step)
        last = self.tap.forwards[-1] if self.tap.forwards else None
        given = {"old_log_probs": old_log_probs, "advantages": advantages, "weights": weights, "rewards": rewards}
        known = checked(None if last is None else last.size, mask, ids, rows, given)
        if last is not None and torch.is_grad_enabled():
            last.known |= known | {"tensors": last.known.get("tensors", {}) | known.get("tensors", {})}
            if log_probs is not None and log_probs.requires_grad:
                log_probs.register_hook(partial(last.add, "coefficient"))

    def log_probs(
        self,
        forward: Forward,
        mask: torch.Tensor,
        ids: torch.Tensor,
        rows: Sequence[Any] | None = None,
        *,
        entropy: bool = False,
        **known: Any,
    ) -> Any:
        """Run a micro-batch's forward, and call :meth:`note` with its outputs.

        Args:
            forward: gives log-probs (B, T); or a tuple: these, entropies (B, T) or None, and a tensor of what else the
                loss is made of and that passes through no hidden state, such as a router's loss.
            mask: as of :meth:`note`.
            ids: as of :meth:`note`.
            rows: as of :meth:`note`.
            entropy: whether ``forward`` gives entropies, too; it may be left out where a tuple says so.
            known: what else :meth:`note` takes.

        Returns:
            What ``forward`` gave, to compute the loss from.

        Raises:
            ValueError: one sentence, where shapes do not fit.
        """
        require(callable(forward), "Watch.log_probs' first argument", "a function", type(forward).__name__)
        if self.localizer is None or not torch.is_grad_enabled():
            return forward()
        for name, value in (("mask", mask), ("ids", ids)):
            require(isinstance(value, torch.Tensor), f"Watch's {name}", "a tensor (B, T)", type(value).__name__)
        before = self.tap.num_seen
        given = forward()
        outputs = outputs_of(given)
        self.note(mask=mask, ids=ids, rows=rows, log_probs=outputs.log_prob, **known)
        check_outputs(outputs, mask, entropy)
        if self.tap.num_seen > before and outputs.auxiliary is not None and outputs.auxiliary.requires_grad:
            last = self.tap.forwards[-1]
            last.again = frozen(forward)
            outputs.auxiliary.register_hook(partial(last.add, "declared_auxiliary"))
        return given

    @contextmanager
    def stage(self, name: str, old_log_probs: torch.Tensor, eta: float = 0.5) -> Iterator[None]:
        """Around a micro-batch's forward and backward: one of Lopti's two stages (arXiv 2505.12929).

        The loop makes two optimizer steps of its batch, one in each stage. In the backward only the stage's tokens have
        a gradient, whatever the loss: its value and its denominators stay, so at the same weights the gradients of both
        stages add up to the ordinary one. What passes through no token is in both.

        Args:
            name: ``low``: the tokens with a probability under ``eta``; ``high``: all others.
            old_log_probs: (B, T), from before both stages: of all positions, or all but the last.
            eta: between 0 and 1.

        Raises:
            ValueError: one sentence, for a wrong argument.
            RuntimeError: one sentence, where the stage could not be kept to: take no step then.
        """
        require(name in ("low", "high"), "Watch.stage's name", "low or high", name)
        require(0 < eta < 1, "Watch.stage's eta", "a number between 0 and 1", eta)
        require(self.localizer is not None, "Watch's action", 'another than "off" in a stage', "off")
        stage, self.stage_name = StageTokens(old_log_probs.detach().exp() < eta, name == "low"), name
        self.tap.stage = stage
        try:
            yield
        finally:
            self.tap.stage = None
        made = [each for each in self.tap.forwards if each.stage is stage]
        is_inlined = self.tap.has_trained_head and any(not each.head_calls for each in made)
        if not made or is_inlined or self.tap.has_failed or not all(each.is_done for each in made):
            why = "the head's weight is used without a call of the head" if is_inlined else "no gradient passed by"
            raise RuntimeError(f"Watch.stage: the {name} stage was not kept to ({why}); take no step of this gradient")


def checked(
    size: tuple[int, ...] | None,
    mask: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: Sequence[Any] | None,
    given: Mapping[str, torch.Tensor | None],
) -> dict[str, Any]:
    """Return what is known of a forward: ``mask`` and ``ids`` (B, T), ``rows``, and ``tensors`` (B, T) by name.

    Args:
        size: B and T of the forward where no mask is given; None: there is no forward.
        mask: (B, T), or None.
        ids: (B, T), or None.
        rows: B names, or None.
        given: (B, T) or (B,) by name, or None; ``rewards`` are (B,).

    Raises:
        ValueError: one sentence, where shapes do not fit.
    """
    for name, value in (("mask", mask), ("ids", ids)):
        is_matrix = value is None or isinstance(value, torch.Tensor) and value.dim() == 2
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        require(is_matrix, f"Watch's {name}", "a tensor (B, T)", found)
    require((mask is None) == (ids is None), "Watch's mask and ids", "given together", "one of them")
    known: dict[str, Any] = {}
    if mask is not None and ids is not None:
        size = tuple(mask.shape)
        if ids.shape != mask.shape:
            raise ValueError(
                f"Watch: the ids have shape {tuple(ids.shape)}, the mask {size}: give all of the tokens that the "
                "positions predict, such as ids[:, 1:] for next-token log-probs."
            )
        known |= {"mask": mask.detach().bool(), "ids": ids.detach()}
    if size is None:
        return known
    if rows is not None:
        known["rows"] = [*rows]
        if len(known["rows"]) != size[0]:
            raise ValueError(f"Watch: rows has {len(known['rows'])} names for {size[0]} rows.")
    known["tensors"] = {name: _wide(name, value, size) for name, value in given.items() if value is not None}
    rewards = known["tensors"].pop("rewards", None)
    if rewards is not None:
        zeros = torch.zeros(size, device=rewards.device)
        known["tensors"]["token_level_scores"] = at_first(rewards[:, 0], zeros)
    return known


def _wide(name: str, value: Any, size: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor (B, T) or (B,) expanded to (B, T)."""
    require(isinstance(value, torch.Tensor), f"Watch's {name}", "a tensor", type(value).__name__)
    value = value.detach().view(-1) if name == "rewards" else value.detach()
    value = value.unsqueeze(1) if value.dim() == 1 else value
    if value.dim() != 2 or value.shape[0] != size[0] or value.shape[1] not in (1, size[1]):
        raise ValueError(f"Watch: {name} has shape {tuple(value.shape)}, the mask {size}.")
    return value.expand(size)


def check_outputs(outputs: Outputs, mask: torch.Tensor, has_entropy: bool) -> None:
    """Refuse log-probs and entropies that are not of the mask's shape.

    Raises:
        ValueError: one sentence.
    """
    shapes = {"log_probs": outputs.log_prob.shape, "entropies": getattr(outputs.entropy, "shape", None)}
    for name, shape in shapes.items():
        if shape is not None and shape != mask.shape:
            raise ValueError(
                f"Watch.log_probs: the {name} have shape {tuple(shape)}, the mask {tuple(mask.shape)}: give all of the "
                "tokens that the log-probs are of, such as ids[:, 1:] for next-token log-probs."
            )
    if has_entropy and outputs.entropy is None:
        raise ValueError("Watch.log_probs: with entropy=True the function returns (log_probs, entropies).")
