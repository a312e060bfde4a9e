# SPDX-License-Identifier: Apache-2.0
"""One spike, from the norm that broke the policy to the gradient that the step takes: look, decide, gather, act.

The localizer rides along in every update: it keeps each micro-batch's log-probs and the coefficients that the backward
puts on them, notes the random state and local norms, all without communication. When a norm breaks the policy that the
driver sent, it searches for the tokens, decides what to do, gathers the event, and puts into ``.grad`` what the step is
to take. What it needs of the trainer are two protocols: a step that can be replayed (``core.probe.TrainingStep``)
and the actor's few powers. A failure in here is logged, counted and steps aside, on all ranks together.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ..core.actions import Action, ActionLimits, Outcome, decide, decide_without_search
from ..core.gradients import GradientSpace
from ..core.memory import choose_way
from ..core.probe import Prober, RngState, TrainingStep
from ..core.ranks import LostRank, Ranks
from ..core.selection import Token
from ..core.tracker import NormTracker, median_size
from ..core.trigger import Place, Spike, StepPolicy
from ..search.find import Finding

__all__ = ["ActorPowers", "Localizer", "SpikeContext"]

T = TypeVar("T")

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_MAX_FAILURES = 3


class ActorPowers(Protocol):
    """What the localizer may ask of the trainer's actor, beside replaying its step."""

    clip_limit: float
    """The norm that the gradient in ``.grad`` has been clipped to when a step is looked into; inf: not clipped yet."""
    scales_loss: bool
    """Whether the loss is scaled (fp16), so that a norm may overflow by the scale alone."""

    def clip(self) -> torch.Tensor:
        """Clip the gradient in ``.grad`` as training does; returns its norm before that, a scalar."""

    def save_weights(self, global_step: int) -> str | None:
        """Save the weights that the event happened at; returns the folder, None where none are to be saved."""


@dataclass(frozen=True)
class SpikeContext:
    """Everything that is known of one spike when its event is gathered; the same on every rank but for the shards."""

    place: Place
    spike: Spike
    finding: Finding
    step: TrainingStep
    space: GradientSpace
    ranks: Ranks
    squares: torch.Tensor
    """The spike's squared norm per parameter, before clipping: float64 (num_params,)."""
    history: torch.Tensor | None
    """The same of earlier steps: float64 (steps, num_params); None when it was not tracked."""
    action: Action
    clip_limit: float
    """The norm that the actor clips to; inf where it does not clip the whole."""
    checkpoint: str | None
    """Where the weights were saved."""
    head_square: torch.Tensor
    """This process' part of the squared gradient norm of the output head, before clipping."""


Search = Callable[..., Finding]
"""Finds and certifies culprits, see :func:`~..search.find.localize`."""


class Localizer:
    """Watches an actor's updates and looks into the spikes that the driver's policy names.

    Args:
        powers: the actor's.
        ranks: the data-parallel ranks.
        limits: what may be done to a step that spiked.
        search: finds and certifies culprits.
        gather: turns what is known into an event; all ranks call it together.
        head_square: the output head's part of the squared norm of what is in ``.grad``, of this process: a scalar.
        layer_window: optimizer steps whose norm per parameter is remembered; 0 for none.
    """

    def __init__(
        self,
        powers: ActorPowers,
        ranks: Ranks,
        limits: ActionLimits,
        search: Search,
        gather: Callable[[SpikeContext], Any],
        head_square: Callable[[GradientSpace], torch.Tensor],
        layer_window: int = 0,
    ):
        self.powers, self.ranks, self.limits = powers, ranks, limits
        self._search, self._gather, self._head_square = search, gather, head_square
        self._tracker = NormTracker(layer_window)
        self._policy: StepPolicy | None = None
        self._space: GradientSpace
        self._step: TrainingStep
        self._num_searches = 0
        self._num_to_write = 0
        self.norms: list[float] = []
        """Of the present update, before clipping: epochs x mini-batches, in order."""
        self.head_squares: list[torch.Tensor] = []
        """Likewise, this process' part of the squared norm of the output head."""
        self.events: list[Any] = []
        """Of the present update; the policy says how many there may be."""
        self.outcomes: list[Outcome] = []
        """All spikes of the present update, also those that no event is written of."""
        self.coefficient = 0.0
        """Median |d loss / d log_prob| of this rank's tokens in the update's first mini-batch, those without aside."""
        self.num_failures = 0

    # ---- the moments of an update, in order

    def begin_update(self, policy: StepPolicy | None, space: GradientSpace) -> None:
        """Take the step's policy; None: nothing is looked into."""
        self._policy, self._space = policy, space
        self.norms, self.head_squares, self.events, self.outcomes = [], [], [], []
        self._num_searches = self._num_to_write = 0
        self._tracker.begin_update()

    def begin_mini_batch(self, step: TrainingStep) -> None:
        """Ride along with a step; its micro-batches run next, each forward and backward once."""
        self._step, self._began = step, time.perf_counter()
        self._tracker.begin_mini_batch()

    def after_backward(self) -> None:
        """Note the norms of what ``.grad`` has accumulated so far."""
        self._tracker.after_backward(self._space)

    def before_step(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Look into the step if it spikes.

        Args:
            grad_norm: scalar, before clipping; ``.grad`` holds the gradient, clipped to the actor's ``clip_limit``.

        Returns:
            The norm of the gradient that the step will take, before clipping: the same unless the action put another
            gradient (or none) into ``.grad``.
        """
        norm = float(grad_norm)
        self._step_seconds = time.perf_counter() - self._began
        self.norms.append(norm)
        self.head_squares.append(self._head_square(self._space) / self._clip_scale(norm) ** 2)
        if self._policy is not None and len(self.norms) == 1:
            step = self._step
            self.coefficient = median_size(step.coefficients(index)[0] for index in range(step.num_micro_batches))
        spike = self._find_spike(norm)
        if spike is not None:
            grad_norm = self._handle(spike, grad_norm)
        is_spike = spike is not None or not math.isfinite(norm)
        self._tracker.after_mini_batch(self._space, self._clip_scale(norm), self._step.loss_scale, is_spike)
        del self._step  # its micro-batches need not live until the next one
        return grad_norm

    def end_update(self) -> None:
        """Let go of the update's parameters; ``norms`` and ``events`` stay until the next."""
        self._tracker.end_update()
        del self._space

    # ---- inside

    def _clip_scale(self, norm: float) -> float:
        """How torch and FSDP clip: the gradient in ``.grad`` is this times the true one."""
        return min(1.0, self.powers.clip_limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    @property
    def _spiking_policy(self) -> StepPolicy:
        assert self._policy is not None, "without a policy nothing is a spike"
        return self._policy

    def _find_spike(self, norm: float) -> Spike | None:
        policy = self._policy
        if policy is None or self.num_failures >= _MAX_FAILURES:
            return None
        spike = policy.spike(norm, len(self.norms) - 1)
        if spike is None or spike.kind != "non_finite" or not self.powers.scales_loss:
            return spike
        # an overflow by the fp16 scaler's scale alone is its everyday business, and no spike
        return spike if self._safely(self._has_finite_loss) is False else None

    def _has_finite_loss(self) -> bool:
        """Whether the loss is finite before it is scaled, on all ranks."""
        step = self._step
        is_finite = self.ranks.agree(lambda: all(step.has_finite_loss(i) for i in range(step.num_micro_batches)))
        return self.ranks.all(is_finite)

    def _handle(self, spike: Spike, grad_norm: torch.Tensor) -> torch.Tensor:
        """Act on the spike; look into it where an event may be written of it, or where the action needs to know."""
        is_written = self._num_to_write < self._spiking_policy.max_events
        action = None if is_written else decide_without_search(self.limits, spike, self._num_searches)
        if action is None:
            return self._look_into(spike, grad_norm, is_written)
        taken_norm = None
        if action.taken != "observe":
            taken_norm = self._safely(partial(self._act, action.taken, []))
            if taken_norm is None:  # it failed, and the step is taken as it was
                return grad_norm
        self.outcomes.append(Outcome(len(self.norms) - 1, spike.grad_norm, action.taken, is_written=False))
        return grad_norm if taken_norm is None else taken_norm

    def _look_into(self, spike: Spike, grad_norm: torch.Tensor, is_written: bool) -> torch.Tensor:
        """Localize and act; where that fails the step stays as it was."""
        self._num_searches += 1
        self._num_to_write += is_written
        before = self._space.current()
        found = self._safely(partial(self._localize_and_act, spike, is_written))
        if found is None:
            self._space.put(before)
            return grad_norm
        event, action, taken_norm = found
        self.events += [event] if is_written else []
        self.outcomes.append(Outcome(len(self.norms) - 1, spike.grad_norm, action.taken, is_written))
        return grad_norm if taken_norm is None else taken_norm

    def _safely(self, joint: Callable[[], T]) -> T | None:
        """What all ranks find out together; None, counted, where it failed in a way that all of them know of."""
        try:
            return self.ranks.together(joint)
        except LostRank:
            logger.critical(
                "gradloc: this rank cannot go on in step with its peers; it ends now, so that nothing hangs until a "
                "time-out. Switch spike_detection off to train without gradloc.",
                exc_info=True,
            )
            logging.shutdown()
            os._exit(1)
        except Exception:
            self.num_failures += 1
            logger.exception(
                "gradloc: looking into the spike at step %s failed (failure %d of %d before it switches itself off); "
                "training goes on with the gradient it had",
                self._spiking_policy.global_step,
                self.num_failures,
                _MAX_FAILURES,
            )
            return None

    def _localize_and_act(self, spike: Spike, is_written: bool) -> tuple[Any, Action, torch.Tensor | None]:
        space, step, policy = self._space, self._step, self._spiking_policy
        way = self._choose_way(space, step)
        limit, clip_scale = self.powers.clip_limit, self._clip_scale(spike.grad_norm)
        increments = self._tracker.increments(space, self.ranks, step.loss_scale)
        if increments is not None and len(increments) != step.num_micro_batches:
            increments = None  # the gradient was reduced once, after the last micro-batch
        way["update_seconds"] = self.ranks.max([self._step_seconds])[0]
        finding = self._search(step, space, self.ranks, spike, clip_scale, increments, policy.typical, **way)
        overflowed = self.powers.scales_loss and not math.isfinite(spike.grad_norm)
        obstacle = "the fp16 scaler has already found the gradient to overflow" if overflowed else None
        action = decide(self.limits, spike, finding.certificate, finding.tokens, obstacle)
        if not is_written:
            return None, action, self._act(action.taken, finding.tokens)
        context = SpikeContext(
            place=policy.place(len(self.norms) - 1),
            spike=spike,
            finding=finding,
            step=step,
            space=space,
            ranks=self.ranks,
            squares=space.squares().div_(clip_scale**2),
            history=self._tracker.history(space, self.ranks),
            action=action,
            clip_limit=limit,
            checkpoint=self.powers.save_weights(policy.global_step),
            head_square=self.head_squares[-1],
        )
        event = self._gather(context)
        return event, action, self._act(action.taken, finding.tokens)

    def _choose_way(self, space: GradientSpace, step: TrainingStep) -> dict[str, Any]:
        """What the search is called with, over its configuration, where memory is short on some rank."""
        way = self.ranks.agree(lambda: choose_way(space, step.forward_bytes()))
        if self.ranks.all(way == "full"):
            return {}
        logger.warning("gradloc: memory is short, so this spike is searched by bisection alone")
        return {"strategy": "bisect"}

    def _act(self, taken: str, culprits: list[Token]) -> torch.Tensor | None:
        """Put into ``.grad`` what the step is to take; returns its norm, None when that is unchanged."""
        if taken == "observe":
            return None
        device = self._space.params[0].device
        if taken == "mask":
            gradient, rng = self._space.take(), RngState(device)
            try:
                Prober(self._step, self._space, self.ranks).compute_without(culprits)
                return self.ranks.together(self.powers.clip)
            except Exception:
                self._space.put(gradient)
                raise
            finally:
                rng.restore()
        # without gradients the optimizer skips every parameter: no moment, no weight decay, no step count
        zero = self.ranks.agree(lambda: torch.zeros((), device=device))
        self._space.clear()
        return zero
