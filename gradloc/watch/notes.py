# SPDX-License-Identifier: Apache-2.0
"""Take what a loop says about its last forward: tokens, rows, log-probs, advantages; and which stage of Lopti it is in.

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
from .forwarded import Forward, StageTokens, frozen
from .taps import ModelTap


class Notes:
    """Methods of a watch that a loop may call to have more in its events, or to train in Lopti's stages."""

    tap: ModelTap
    localizer: Any
    stage_name: str
    """The present step's stage of Lopti, ``low`` or ``high``; empty for an ordinary step."""
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
        if step is not None:
            self._next_number = int(step)
        last = self.tap.forwards[-1] if self.tap.forwards else None
        tensors = {"old_log_probs": old_log_probs, "advantages": advantages, "weights": weights, "rewards": rewards}
        noted = checked_notes(None if last is None else last.size, mask, ids, rows, tensors)
        if last is not None and torch.is_grad_enabled():
            last.known |= noted | {"tensors": last.known.get("tensors", {}) | noted.get("tensors", {})}
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
        num_before = self.tap.num_seen
        returned = forward()
        checked_notes(None, mask, ids, None, {})  # before the outputs are compared with the mask
        outputs = checked_outputs(returned, mask, entropy)
        self.note(mask=mask, ids=ids, rows=rows, log_probs=outputs.log_prob, **known)
        if self.tap.num_seen > num_before and outputs.auxiliary is not None and outputs.auxiliary.requires_grad:
            last = self.tap.forwards[-1]
            last.again = frozen(forward)
            outputs.auxiliary.register_hook(partial(last.add, "declared_auxiliary"))
        return returned

    @contextmanager
    def stage(self, name: str, old_log_probs: torch.Tensor, eta: float = 0.5) -> Iterator[None]:
        """Run a micro-batch's forward and backward in one of Lopti's two stages (arXiv 2505.12929).

        The loop makes two optimizer steps of its batch, one in each stage. In the backward only the stage's tokens have
        a gradient, whatever the loss: its value and its denominators stay, so at the same weights the gradients of both
        stages add up to the ordinary one. A gradient that passes through no token is in both.

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
        stage = StageTokens(old_log_probs.detach().exp() < eta, name == "low")
        self.tap.stage, self.stage_name = stage, name
        try:
            yield
        finally:
            self.tap.stage = None
        forwards = [each for each in self.tap.forwards if each.stage is stage]
        is_head_inlined = self.tap.has_trained_head and any(not each.head_calls for each in forwards)
        is_done = bool(forwards) and all(each.is_done for each in forwards)
        if is_head_inlined or self.tap.has_failed or not is_done:
            why = "the head's weight is used without a call of the head" if is_head_inlined else "no gradient passed by"
            raise RuntimeError(f"Watch.stage: the {name} stage was not kept to ({why}); take no step of this gradient")


def checked_notes(
    size: tuple[int, ...] | None,
    mask: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: Sequence[Any] | None,
    tensors: Mapping[str, torch.Tensor | None],
) -> dict[str, Any]:
    """Check what a loop noted, and return it: ``mask`` and ``ids`` (B, T), ``rows``, and ``tensors`` (B, T) by name.

    B and T are the mask's, else those of the last forward, ``size``. Tensors may also be (B,), as ``rewards`` are.

    Raises:
        ValueError: one sentence, where shapes do not fit.
    """
    for name, value in (("mask", mask), ("ids", ids)):
        is_matrix = value is None or isinstance(value, torch.Tensor) and value.dim() == 2
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        require(is_matrix, f"Watch's {name}", "a tensor (B, T)", found)
    require((mask is None) == (ids is None), "Watch's mask and ids", "given together", "one of them")
    noted: dict[str, Any] = {}
    if mask is not None and ids is not None:
        size = tuple(mask.shape)
        if ids.shape != mask.shape:
            raise ValueError(
                f"Watch: the ids have shape {tuple(ids.shape)}, the mask {size}: give all of the tokens that the "
                "positions predict, such as ids[:, 1:] for next-token log-probs."
            )
        noted |= {"mask": mask.detach().bool(), "ids": ids.detach()}
    if size is None:
        return noted
    if rows is not None:
        noted["rows"] = list(rows)
        if len(noted["rows"]) != size[0]:
            raise ValueError(f"Watch: rows has {len(noted['rows'])} names for {size[0]} rows.")
    noted["tensors"] = {name: _expanded(name, value, size) for name, value in tensors.items() if value is not None}
    rewards = noted["tensors"].pop("rewards", None)
    if rewards is not None:
        noted["tensors"]["token_level_scores"] = at_first(rewards[:, 0], rewards)
    return noted


def _expanded(name: str, value: Any, size: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor (B, T) or (B,) expanded to (B, T)."""
    require(isinstance(value, torch.Tensor), f"Watch's {name}", "a tensor", type(value).__name__)
    value = value.detach().view(-1) if name == "rewards" else value.detach()
    value = value.unsqueeze(1) if value.dim() == 1 else value
    if value.dim() != 2 or value.shape[0] != size[0] or value.shape[1] not in (1, size[1]):
        raise ValueError(f"Watch: {name} has shape {tuple(value.shape)}, the mask {size}.")
    return value.expand(size)


def checked_outputs(given: Any, mask: torch.Tensor, has_entropy: bool) -> Outputs:
    """Return what a loop's function gave, as a search reads it.

    Raises:
        ValueError: one sentence, where it gave something else, or log-probs or entropies that are not of the mask's
            shape.
    """
    parts = [*given] if isinstance(given, tuple | list) else [given]
    are_tensors = [isinstance(part, torch.Tensor) or (place and part is None) for place, part in enumerate(parts)]
    if not (1 <= len(parts) <= 3 and all(are_tensors)):
        found = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            "Watch.log_probs takes a function that returns log_probs, (log_probs, entropies) or (log_probs, entropies, "
            f"part), all tensors and the last two maybe None, found {found}."
        )
    outputs = Outputs(*parts)
    for name, value in (("log_probs", outputs.log_prob), ("entropies", outputs.entropy)):
        if value is not None and value.shape != mask.shape:
            raise ValueError(
                f"Watch.log_probs: the {name} have shape {tuple(value.shape)}, the mask {tuple(mask.shape)}: give all "
                "of the tokens that the log-probs are of, such as ids[:, 1:] for next-token log-probs."
            )
    if has_entropy and outputs.entropy is None:
        raise ValueError("Watch.log_probs: with entropy=True the function returns (log_probs, entropies).")
    return outputs
