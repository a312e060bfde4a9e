# SPDX-License-Identifier: Apache-2.0
"""Any PyTorch loop, in three lines: ``gradloc.Watch``.

    watch = gradloc.Watch(model, optimizer, "runs/x", action="mask", tokenizer=tokenizer)
    log_probs = watch.log_probs(lambda: forward(ids), mask, ids)    # of each micro-batch
    norm = watch.clip_grad_norm_(1.0)                               # in place of torch's; then optimizer.step()

The loss is the loop's own and is never seen. Shapes: B rows of a micro-batch, T positions.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from ..checks import require
from ..config import GradLocConfig, settings_without_verl
from ..core.probe import Prober
from ..core.ranks import Ranks, host_group
from ..core.sharding import compute_device, compute_dtype, is_reduction_deferred
from ..core.step import Recorded, RngState
from ..loop.batch import Rows, at_first
from ..loop.driver import Driver
from ..loop.wire import Policy
from ..record import Run
from ..record.origin import origin
from ..words.advice import LOOP
from .colocated import Colocated, whole
from .step import Forward, LoopMicroBatch, LoopStep, autocast_now, outputs_of

logger = logging.getLogger(__name__)

_SAME, _SAME_IN_HALF = 1e-3, 0.02
"""Of the norm: two runs of a step differ by less, in float32 and in half precision."""
_BESIDE = (
    "gradloc: run again from its log-probs, step %d's gradient differs by %.1f %% of its norm. A part of the loss "
    "passes by them (label smoothing, a z-loss, a router's loss), or the function does not give the same again. "
    "Return such a part third, as (log_probs, None, part). Until then mask becomes skip."
)
_SCALED = (
    "gradloc: step %d's gradient is %.4g times what its log-probs give. Gradients were multiplied after the backward "
    "(multiply the loss instead), Watch lacks the loop's GradScaler, or the function does not give the same again. "
    "Until then mask becomes skip."
)


class Watch(Colocated):
    """Looks into the steps of one loop, in every process of it.

    Steps 1, 2, 4, 8 and so on are run twice, to see that their forward can be run again and that the whole gradient
    comes by the log-probs; else one sentence says so.

    Args:
        model: as the loop calls it: plain, compiled, with adapters, in DDP, FSDP1 or FSDP2.
        optimizer: torch's, or accelerate's around it. Its ``zero_grad`` tells that a gradient was dropped.
        folder: of the run; events go to ``gradloc`` in it.
        action: ``observe``, ``mask``, ``skip``, ``abort`` or ``off``.
        tokenizer: decodes what is named; None: events have token ids alone.
        scaler: fp16's ``GradScaler``; False where a loss in fp16 is not scaled.
        settings: further blocks by name, as ``trigger={"tau": 640.0}``; docs/configuration.md has all.

    Raises:
        ValueError: one sentence, for a wrong setting or a model that no search could look into.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | os.PathLike[str],
        action: str = "observe",
        tokenizer: Any = None,
        scaler: Any = None,
        **settings: Any,
    ):
        require(isinstance(model, torch.nn.Module), "gradloc.Watch's model", "a torch.nn.Module", type(model).__name__)
        self.model = getattr(model, "_orig_mod", model)  # of a compiled one: a forward through either is the same
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # in accelerate's
        is_one = hasattr(self.optimizer, "param_groups") and hasattr(self.optimizer, "zero_grad")
        require(is_one, "gradloc.Watch's optimizer", "one torch optimizer", type(optimizer).__name__)
        self.scaler, self.clip_limit = scaler, float("inf")
        self.scales_loss = bool(scaler)
        self.takes_what_is_not_finite = not self.scales_loss
        self.metrics: dict[str, float] = {}
        """Of the last step, by name, for any tracker; on the first process."""
        self.number = 0
        """Of the optimizer steps so far."""
        self._next_try, self._gap = 0.0, 1
        self._num_noted = 0
        kept = None if action == "off" else _settings(action, settings, os.fspath(folder))
        if kept is not None:
            _check_wrapper(self.model)
            is_trained = any(param.requires_grad for param in self.model.parameters())
            require(is_trained, "gradloc.Watch's model", "one with a parameter that requires a gradient", "none")
        ranks = Ranks(host_group(), device=compute_device(next(self.model.parameters())))
        super().__init__(ranks, kept, partial(_driver_of, kept, os.path.basename(os.path.abspath(folder)), tokenizer))
        if kept is not None:
            self._listen()

    # ---- the calls of a loop

    def log_probs(
        self,
        forward: Forward,
        mask: torch.Tensor,
        ids: torch.Tensor,
        rows: Sequence[Any] | None = None,
        *,
        old_log_probs: torch.Tensor | None = None,
        advantages: torch.Tensor | None = None,
        rewards: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        entropy: bool = False,
    ) -> Any:
        """Run a micro-batch's forward, and remember how to run it again.

        Where no gradient is asked for, as in an evaluation, it is run and nothing else.

        Args:
            forward: gives log-probs (B, T); or a tuple: these, entropies (B, T) or None, and a tensor of what else the
                loss is made of, which then belongs to no token. It is kept with its variables as they are now.
            mask: (B, T), true or 1 where a token is trained on.
            ids: (B, T) the tokens that the log-probs are of.
            rows: names of the documents or rollouts; equal ones are of one prompt.
            old_log_probs: (B, T), as the loss takes them. These and the next are for the record alone.
            advantages: (B, T) or (B,).
            rewards: (B,).
            weights: (B, T) or (B,), how much a token weighs in the step's loss.
            entropy: whether ``forward`` gives entropies, too; it may be left out where a tuple says so.

        Returns:
            What ``forward`` gave, to compute the loss from.

        Raises:
            ValueError: one sentence, where shapes do not fit.
        """
        if self.localizer is None or not torch.is_grad_enabled():
            return forward()
        require(callable(forward), "Watch.log_probs' first argument", "a function", type(forward).__name__)
        for name, value in (("mask", mask), ("ids", ids)):
            is_matrix = isinstance(value, torch.Tensor) and value.dim() == 2
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            require(is_matrix, f"Watch.log_probs' {name}", "a tensor (B, T)", found)
        rows = None if rows is None else [*rows]
        step = self._present_step()
        self._note_backward()
        known = {"old_log_probs": old_log_probs, "advantages": advantages, "weights": weights}
        tensors = {name: _wide(name, value, mask) for name, value in known.items() if value is not None}
        if rewards is not None:
            tensors["token_level_scores"] = at_first(_wide("rewards", rewards, mask, is_flat=True)[:, 0], mask)
        autocast, dtype = autocast_now(self.ranks.device)
        if dtype == torch.float16:
            require(self.scaler is not None, "scaler", "the loop's GradScaler under float16 (False: none)", None)
        made = LoopMicroBatch(
            mask.detach().bool(),
            ids.detach(),
            tensors,
            Recorded(RngState(self.ranks.device)),
            autocast,
            dtype or compute_dtype(self.model),
            rows,
            is_reduction_deferred(self.model),
        )
        given = step.run(forward, made)
        _check_outputs(given, mask, ids, rows, entropy)
        return given

    def clip_grad_norm_(self, max_norm: float | None = None) -> torch.Tensor:
        """Clip the gradient as ``torch.nn.utils.clip_grad_norm_`` does, and look into the step if it spikes.

        With a scaler call ``scaler.unscale_(optimizer)`` first, as before torch's.

        Args:
            max_norm: what the L2 norm is clipped to; None: it is not.

        Returns:
            The norm before clipping, of the gradient that the optimizer is given: 0 where the step is skipped.

        Raises:
            AbortedBySpike: where a spike is to stop the run.
            ValueError: where the scaler has not unscaled the gradient.
        """
        self.clip_limit = float("inf") if max_norm is None else float(max_norm)
        if self.step is not None:
            self._note_backward()
            self._check_scale()
        return self.before_step(self.clip())

    def before_step(self, norm: torch.Tensor) -> torch.Tensor:
        """Look into the step whose gradient the loop has clipped, to ``clip_limit``; see :meth:`clip_grad_norm_`."""
        step = self.step
        if step is not None:
            step.forget(is_done=False)
        if step is None or not step.micro_batches:
            return norm
        self.number += 1
        try:
            with torch.enable_grad():  # the loop may clip without
                norm, metrics = self.end_step(norm, self.number)
        finally:
            self.step = None
        self.metrics = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What was learned, for the loop's checkpoint; on the first process all of it."""
        return {"number": self.number, "driver": None if self.driver is None else self.driver.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.number = int(state["number"])
        if self.driver is not None and state["driver"] is not None:
            self.driver.load_state(state["driver"])

    # ---- what the localizer asks

    def clip(self) -> torch.Tensor:
        if isinstance(self.model, FSDP1):
            return self.model.clip_grad_norm_(self.clip_limit)
        return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_limit))

    def save_weights(self, global_step: int) -> None:
        """A loop keeps its own checkpoints."""

    @property
    def signal(self) -> str:  # type: ignore[override]
        return "advantages" if self.step.has_advantages else "loss_weights"

    def rows(self, step: Any) -> Rows:
        if not step.has_advantages and self.localizer is not None:
            self.localizer._safely(lambda: step.read_logits(self.space.forward_state()))
            self.space.reshard()  # weights gathered by a forward alone would outlive the optimizer's step
        return step.all_rows()

    # ---- inside

    def _present_step(self) -> LoopStep:
        if self.step is None:
            self.begin_step(LoopStep(self.model, self.ranks.size, self._scale), self.model)
            self._num_noted = 0
        return self.step

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler else 1.0

    def _check_scale(self) -> None:
        is_scaled = isinstance(self.scaler, torch.amp.GradScaler) and self.scaler.is_enabled()
        if is_scaled and any(each.is_done for each in self.step.micro_batches):
            stage = self.scaler._per_optimizer_states[id(self.optimizer)]["stage"]
            if stage.name != "UNSCALED":
                raise ValueError(
                    "Watch.clip_grad_norm_ takes gradients in their own unit: call scaler.unscale_(optimizer) first."
                )

    def _note_backward(self) -> None:
        """Note the gradient's norm so far, once for each backward; or that the loop dropped it."""
        self._drop_what_is_gone()
        done = [each for each in self.step.micro_batches if each.is_done]
        if len(done) > self._num_noted:
            self._num_noted = len(done)
            if not done[-1].is_deferred:
                self.localizer.after_backward()

    def _listen(self) -> None:
        """Where the loop drops a gradient, drop what was recorded of it."""
        zero_grad = self.optimizer.zero_grad

        @wraps(zero_grad)
        def and_forget(*args: Any, **given: Any) -> None:
            zero_grad(*args, **given)
            if self.step is not None and any(each.is_done for each in self.step.micro_batches):
                self._drop()

        self.optimizer.zero_grad = and_forget  # type: ignore[method-assign]

    def _drop(self) -> None:
        self.step.forget(is_done=True)
        self._num_noted = 0
        self.localizer.begin_mini_batch(self.step)  # type: ignore[union-attr]

    def _drop_what_is_gone(self) -> None:
        """Where no ``.grad`` is left, as after the model's own ``zero_grad``. That is not wrapped: a copy of the model
        would empty this one."""
        done = [each for each in self.step.micro_batches if each.is_done]
        is_elsewhere = isinstance(self.model, FSDP1) or (
            isinstance(self.model, FSDPModule) and any(each.is_deferred for each in done)
        )
        if done and not is_elsewhere and all(param.grad is None for param in self.space.params):
            self._drop()

    def before_look(self, norm: torch.Tensor, policy: Policy) -> None:
        """Run a step again, the first and ever fewer after it, and say what does not come back."""
        if self.number < self._next_try or self.localizer is None or not 0 < float(norm) < float("inf"):
            return
        if policy.spike(float(norm), 0) is None:  # beside a spike, little else is seen
            self._next_try, self._gap = self.number + self._gap, 2 * self._gap
        clip_scale = self.localizer._clip_scale(float(norm))
        found = self.localizer._safely(partial(self._difference, clip_scale))
        if found is None:
            self._next_try = float("inf")
            return
        same = _SAME if self.step.numerics.dtype == torch.float32 else _SAME_IN_HALF
        factor, beside, differs = found
        if not differs <= same:
            self._next_try = float("inf")
            if self.ranks.is_first:
                said = (_SCALED, self.number, factor) if beside <= same else (_BESIDE, self.number, 100 * differs)
                logger.warning(*said)
            settings = self.settings
            if settings.action.mode == "mask":
                self.localizer.settings = replace(settings, action=replace(settings.action, mode="skip"))

    def _difference(self, scale: float) -> tuple[float, float, float]:
        """Of the gradient, which clipping has scaled, and the same from the log-probs: the factor that brings them
        nearest to each other, and over the gradient's norm how far they are apart with it and without; where a later
        step leaves no memory for another gradient as if they were the same."""
        if self._gap > 2 and not self._has_room():
            return 1.0, 0.0, 0.0
        space, state = self.space, self.space.forward_state()
        saved = space.take()
        try:
            prober = Prober(self.step, space, self.ranks)
            prober.compute((index, None) for index in range(self.step.num_micro_batches))
            squares, dots = space.squares_and_dots(saved)
            again, norm = float(squares.sum()), space.norm(saved) / scale
            factor = float(dots.sum()) / scale / again if 0 < again < float("inf") else 0.0
            factor = factor if abs(factor - 1) > _SAME else 1.0
            space.scale(factor)
            prober.add(saved, alpha=-1.0 / scale)
            beside = space.norm() / norm
            space.reshard()
        finally:
            space.put(saved)
            state.restore()
        return factor, beside, math.hypot(beside, (factor - 1) * again**0.5 / norm)

    def _has_room(self) -> bool:
        """Whether every rank could search without moving anything to the host."""
        _, room = self.localizer._set_aside()
        return self.ranks.max([float(self.ranks.agree(lambda: room.need.least_way(room.memory())))])[0] == 0


def _driver_of(settings: GradLocConfig, name: str, tokenizer: Any) -> Driver:
    run = replace(origin(Run(None, name), {}, "torch"), trainer=LOOP)
    driver = Driver(settings, tokenizer=tokenizer, run=run, trained={})
    driver.action_key = "action"
    print(f"gradloc: on ({settings.action.mode}); events go to {settings.root}", flush=True)
    return driver


def _settings(action: Any, blocks: dict[str, Any], folder: str) -> GradLocConfig | None:
    """The effective ones; a loop has no checkpoint format, and nothing that could replay a bundle."""
    mode = {"mode": action} if isinstance(action, str) else action
    given = {"action": mode, **blocks, "evidence": {"bundle": "off", **blocks.get("evidence", {})}}
    settings = settings_without_verl(given, os.path.join(folder, "gradloc"), "a loop, which has none")
    kinds = "observe, mask, skip or abort in a loop, of whose loss no other setting is known"
    require(settings is None or settings.action.mode != "heal", "gradloc.action.mode", kinds, "heal")
    for name in () if settings is None else ("bundle", "checkpoint"):
        value = getattr(settings.evidence, name)
        require(value == "off", f"gradloc.evidence.{name}", "off in a loop of one's own, which no replay knows", value)
    return settings


def _check_wrapper(model: torch.nn.Module) -> None:
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    is_wrapped = isinstance(model, DistributedDataParallel | FSDP1 | FSDPModule)
    if num_processes > 1 and not is_wrapped:
        raise ValueError(
            f"gradloc.Watch takes the model as the loop calls it, with {num_processes} processes in DDP or FSDP, found "
            f"a {type(model).__name__}: pass what DistributedDataParallel or fully_shard gave."
        )
    has_views = isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    expected = 'false with gradloc.Watch, whose replays would overwrite the gradient (action="off" trains without)'
    require(not has_views, "DistributedDataParallel's gradient_as_bucket_view", expected, True)


def _wide(name: str, value: Any, mask: torch.Tensor, is_flat: bool = False) -> torch.Tensor:
    """As (B, T)."""
    require(isinstance(value, torch.Tensor), f"Watch.log_probs' {name}", "a tensor", type(value).__name__)
    value = value.detach().view(-1) if is_flat else value.detach()
    value = value.unsqueeze(1) if value.dim() == 1 else value
    if value.dim() != 2 or value.shape[0] != mask.shape[0] or value.shape[1] not in (1, mask.shape[1]):
        raise ValueError(f"Watch.log_probs: {name} has shape {tuple(value.shape)}, the mask {tuple(mask.shape)}.")
    return value.expand(mask.shape)


def _check_outputs(
    given: Any, mask: torch.Tensor, ids: torch.Tensor, rows: Sequence[Any] | None, has_entropy: bool
) -> None:
    log_prob, entropy, _ = outputs_of(given)
    shapes = {"log_probs": log_prob.shape, "ids": ids.shape, "entropies": None if entropy is None else entropy.shape}
    for name, shape in shapes.items():
        if shape is not None and shape != mask.shape:
            raise ValueError(
                f"Watch.log_probs: the {name} have shape {tuple(shape)}, the mask {tuple(mask.shape)}: give all of the "
                "tokens that the log-probs are of, such as ids[:, 1:] for next-token log-probs."
            )
    if rows is not None and len(rows) != len(mask):
        raise ValueError(f"Watch.log_probs: rows has {len(rows)} names for {len(mask)} rows.")
    if has_entropy and entropy is None:
        raise ValueError("Watch.log_probs: with entropy=True the function returns (log_probs, entropies).")
