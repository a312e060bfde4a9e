# SPDX-License-Identifier: Apache-2.0
"""Handle a gradient spike on the ranks, in the order in which it happens; this file reads straight down.

1. *Ride along* (``begin_update`` to ``after_backward``): keep each micro-batch's log-probs, entropies and their
   coefficients. Nothing is communicated, and no device is waited for.
2. *Detect* (``before_step``): all ranks compare the norm with the policy that the driver sent.
3. *Set aside* training's gradient, so that it comes back bit for bit whatever follows, and *make room* for a search.
4. *Search* for the tokens, and certify the norm without them (``..search.find.localize``).
5. *Decide* what becomes of the step (``.actions``).
6. *Act*: put the gradient that the step takes into ``.grad``.
7. *Gather* what the ranks know of the event (``.gather``); the driver completes and writes it. The step is settled
   then, so a record that fails costs nothing but itself.

The trainer provides a step that can be replayed (``..core.step.TrainingStep``) and a ``TrainerHandle``. A failure in
here is logged and counted, and training goes on, on all ranks together.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..core.gradients import Gradient, GradientSpace
from ..core.host_step import HostStep, to_host
from ..core.memory import SearchMemory, StepPeak
from ..core.memory_plans import PLANS
from ..core.precision import cast_bytes
from ..core.probe import Prober
from ..core.ranks import LostRank, Ranks
from ..core.step import LossReplay, Scheduled, TrainingStep, has_finite_loss, typical_sizes
from ..core.tracker import NormTracker, SpikeNorms, median_size
from ..explain.text import plural
from ..fault.find import Clues, find_broken_link
from ..fault.reference import ReferenceKeeper, with_live_loss
from ..fault.updates import Updates
from ..record import Action
from ..search.cures import records_under
from ..search.find import localize
from ..search.step_causes import diverged_params
from ..search.task import SearchResult
from ..trigger import Spike
from .actions import Outcome, decide, decide_without_search
from .fingerprint import own_weight_sums
from .gather import RawEvent, SpikeContext, raw_event
from .layers import head_square
from .messages import Policy, RankReport

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_MASK_TOLERANCE = 0.02  # of the norm: a masked gradient's may differ by more than the certificate's bound by this part
_HEARTBEAT_S = 30.0  # between lines that say that a search goes on


class TrainerHandle(Protocol):
    """The interface to the trainer's actor, apart from the step that can be replayed."""

    optimizer: torch.optim.Optimizer
    """The optimizer, whose state may be moved to the host's memory while a step is looked into."""
    is_unclipped: bool
    """Whether the gradient of a step that is looked into was put back as it was before clipping."""
    scales_loss: bool
    """Whether the loss is scaled (fp16), so that a norm may overflow by the scale alone."""
    takes_what_is_not_finite: bool
    """Whether the optimizer would be given a gradient that is not finite."""

    @property
    def clip_limit(self) -> float:
        """The norm that the gradient in ``.grad`` is clipped to when a step is looked into; inf: not clipped yet."""

    def clip(self) -> torch.Tensor:
        """Clip the gradient in ``.grad`` as training does; returns its norm before that, a scalar."""

    def save_weights(self, global_step: int) -> str | None:
        """Save the weights that the event happened at; returns the folder, None where none are to be saved."""


class Settled(NamedTuple):
    """A spike that was searched, and the step that was decided on."""

    finding: SearchResult
    step: HostStep
    norms: SpikeNorms
    """As clipped."""
    action: Action
    norm: torch.Tensor
    """The norm of the gradient that the step takes, before clipping; a scalar."""


class Localizer:
    """Watches an actor's updates and looks into the spikes that the driver's policy names.

    All ranks make theirs together.

    Args:
        trainer: clips, and saves weights.
        ranks: the data-parallel ranks.
        settings: the effective ones, see :func:`~..config.resolve`.
    """

    def __init__(self, trainer: TrainerHandle, ranks: Ranks, settings: Any):
        self.trainer, self.ranks, self.settings = trainer, ranks, settings
        ranks.connect()
        self._tracker = NormTracker(settings.search.layer_window)
        self._peak = StepPeak()
        self.updates = Updates()
        """The movement of the weights in the optimizer's steps."""
        self.forget_reference()
        self._policy: Policy | None = None
        self._space: GradientSpace
        self._step: TrainingStep
        self._num_updates = self.num_failures = 0
        self._start_anew()

    def forget_reference(self) -> None:
        """Keep another micro-batch as soon as one can be: the last cannot be run again."""
        self._keeper = ReferenceKeeper()

    def _start_anew(self) -> None:
        """Reset what is recorded for each update."""
        self._num_searches = self._num_to_write = 0
        self.norms: list[float] = []
        """Before clipping: epochs x mini-batches, in order."""
        self.head_squares: list[torch.Tensor] = []
        """This process' part of the squared norm of the output head, for each of :attr:`norms`."""
        self.events: list[RawEvent] = []
        """The policy says how many there may be."""
        self.outcomes: list[Outcome] = []
        """All spikes, also those that no event is written of."""
        self._first_step: TrainingStep | None = None
        self._coefficient = 0.0

    # ---- 1. ride along: the moments of an update before its step

    def begin_update(self, policy: Policy | None, space: GradientSpace, are_all_here: bool = True) -> None:
        """Take the step's policy; None: nothing is looked into.

        Args:
            policy: of the update.
            space: the trained parameters.
            are_all_here: whether all ranks call this together; if not, :meth:`check_replicas` follows where they do.
        """
        self._policy, self._space, self._device = policy, space, space.device
        self.updates.follow(self.trainer.optimizer, space)
        self._start_anew()
        self._tracker.begin_update()
        self._num_updates += 1
        if are_all_here:
            self.check_replicas()

    def begin_mini_batch(self, step: TrainingStep) -> None:
        """Ride along with a step; its micro-batches run next, each forward and backward once."""
        self._step = step
        self._keeper.begin(step)
        self._tracker.begin_mini_batch()
        self.begin_passes()

    def begin_passes(self) -> None:
        """Time and peak memory count from here. A trainer that generates within its step calls this behind that."""
        self._began = time.perf_counter()
        self._peak.begin(self._space.device)

    def after_backward(self) -> None:
        """Note the norms of what ``.grad`` has accumulated so far."""
        self._tracker.after_backward(self._space)
        self._keeper.after_backward(self._space)

    # ---- 2. is this norm a spike?

    def decided_norm(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Return the first rank's norm where this step may be a spike, else this rank's; a scalar for
        :meth:`before_step`.

        For trainers whose ranks have the policy before the norm, and learn of the norm by a reduction of the trainer's:
        ranks whose norms differ in the last bit must not part at the threshold. A healthy step sends nothing.
        """
        policy = self._policy
        if policy is None or self.is_off:
            return grad_norm
        rounding = max(torch.finfo(grad_norm.dtype).eps, torch.finfo(torch.float32).eps)
        norm, _ = self.ranks.decided(float(grad_norm), policy.threshold(len(self.norms)), rounding)
        return torch.tensor(norm, dtype=grad_norm.dtype)

    def before_step(self, grad_norm: torch.Tensor, policy: Policy | None = None) -> torch.Tensor:
        """Look into the step if it spikes.

        Args:
            grad_norm: scalar, before clipping; ``.grad`` holds the gradient, clipped to the actor's ``clip_limit``.
            policy: of a trainer whose batch is known only now; else the one that the update began with.

        Returns:
            The norm of the gradient that the step will take, before clipping: the same unless the action put another
            gradient (or none) into ``.grad``. On the host, so that the device is read only once.
        """
        norm = float(grad_norm)
        grad_norm = torch.tensor(norm, dtype=grad_norm.dtype)
        policy = self._policy = policy or self._policy
        self._peak.end(self._space.device)
        self._step_seconds = time.perf_counter() - self._began
        self.norms.append(norm)
        self.head_squares.append(head_square(self._space) / self._clip_scale(norm) ** 2)
        self.updates.note_weights()
        self.updates.number = policy.global_step if policy is not None else self.updates.number + 1
        spike = None
        if policy is not None:
            if len(self.norms) == 1:
                self._first_step = self._step
            spike = self._find_spike(policy, norm)
            if spike is not None:
                grad_norm = self._handle(policy, spike, grad_norm)
        is_spike = spike is not None or not math.isfinite(norm)
        loss_scale = self._step.loss_scale if self.trainer.scales_loss else 1.0
        self._tracker.after_mini_batch(self._space, self._clip_scale(norm), loss_scale, is_spike)
        self._keeper.end(self._step, norm, self.updates.number, is_spike)
        del self._step  # its micro-batches need not live until the next one
        return grad_norm

    def _find_spike(self, policy: Policy, norm: float) -> Spike | None:
        if self.is_off:
            return None
        spike = policy.spike(norm, len(self.norms) - 1)
        if spike is None or spike.kind != "non_finite" or not self.trainer.scales_loss:
            return spike
        # an overflow by the fp16 scaler's scale alone is its everyday business, and no spike
        return spike if self.run_safely(self.is_loss_finite) is False else None

    def is_loss_finite(self) -> bool:
        """Return whether the loss is finite before it is scaled, on all ranks."""
        step = self._step
        is_finite = self.ranks.run_local_synced(
            lambda: all(has_finite_loss(step, i) for i in range(step.num_micro_batches))
        )
        return self.ranks.all(is_finite)

    def _handle(self, policy: Policy, spike: Spike, grad_norm: torch.Tensor) -> torch.Tensor:
        """Act on the spike; look into it where an event may be written of it, or where the action needs to know."""
        is_written = self._num_to_write < policy.max_events
        action = None if is_written else decide_without_search(self.settings.action, spike, self._num_searches)
        if action is None:
            return self._look_into(policy, spike, grad_norm, is_written)
        is_left = action.taken == "observe"  # nothing to agree on
        acted = grad_norm if is_left else self.run_safely(lambda: self._act(action.taken, grad_norm, policy))
        if acted is None:  # it failed, and the step is taken as it was
            return grad_norm
        self.outcomes.append(Outcome(len(self.norms) - 1, spike.grad_norm, action.taken, is_written=False))
        return acted

    # ---- 3. to 7. look into a spike: each stage on all ranks together; where it gave something, the next may follow

    def _look_into(self, policy: Policy, spike: Spike, grad_norm: torch.Tensor, is_written: bool) -> torch.Tensor:
        """Run stages 3 to 7; where one fails, or a search does not fit into memory, the step stays as it was."""
        self._num_searches += 1
        self._num_to_write += is_written
        set_aside = self.run_safely(self._set_aside)
        if set_aside is None:
            return grad_norm
        before, room = set_aside
        settled = None
        try:
            limits = self.run_safely(partial(self._make_room, room))
            if limits is not None:
                settled = self.run_safely(partial(self._settle, policy, spike, grad_norm, limits))
            if settled is None:
                return grad_norm
            before.clear()  # a masked step does not use all of it, and the optimizer's state needs its memory again
            if is_written:
                lost = f"the step was decided before ({settled.action.taken}), and its event is lost"
                is_written = bool(self.run_safely(partial(self._gather, policy, spike, settled), lost))
        finally:
            if settled is None:  # it failed, on this rank or another, or Ctrl-C
                self._space.put(before)
            self.run_safely(partial(self._take_back, room))
        self.outcomes.append(Outcome(len(self.norms) - 1, spike.grad_norm, settled.action.taken, is_written))
        return settled.norm

    def _set_aside(self) -> tuple[Gradient, SearchMemory]:
        """Keep the clipped gradient, to be put back if a stage fails, and forecast the memory that a search needs."""
        before = self._space.take()
        self._space.put(before)
        casts = 0 if isinstance(self._step, Scheduled) else cast_bytes(self._space.module)
        forward = self._step.forward_bytes() + casts
        return before, self.ranks.run_local_synced(
            lambda: SearchMemory(self._space, self.trainer.optimizer, self._peak.size, forward)
        )

    def _make_room(self, room: SearchMemory) -> dict[str, Any] | None:
        """Choose a plan that fits into every rank's memory; returns the search's limits, None where there is none."""
        memory = self.ranks.run_local_synced(room.memory)
        mine = room.need.cheapest_plan(memory)
        number, seconds = self.ranks.max([float(mine), self._step_seconds])
        if number == len(PLANS):
            why = room.need.refusal(memory, room.device) if mine == number else "memory is short on another rank"
            logger.error("gradloc: this spike is not searched: %s", why)
            return None
        plan = PLANS[int(number)]
        self.ranks.run_local_synced(lambda: room.make(plan))
        if plan.moves_optimizer:
            how = "as configured" if plan.is_full else "by bisection only"
            logger.warning("gradloc: memory is short: moving optimizer state off the device, searching %s", how)
        search = self.settings.search
        return {
            "strategy": search.strategy if plan.is_full else "bisect",
            "budget": self.settings.budget,
            "max_culprits": search.max_culprits,
            "max_steps": search.max_steps,
            "update_seconds": seconds,
            "reruns": self.settings.evidence.rerun,
            "max_cures": search.max_cures,
        }

    def _settle(self, policy: Policy, spike: Spike, grad_norm: torch.Tensor, limits: dict[str, Any]) -> Settled:
        """Search, decide, act: what ``.grad`` holds afterwards is what the step takes."""
        step = HostStep(self._step, self._space.device, self.ranks.size)
        norms = self._tracker.read(
            self._space,
            self.ranks,
            step.loss_scale,
            summed=[self.head_squares[-1] * self._space.num_replicas, *self._keeper.squares(self._space)],
            along=self.updates.open,
            more=lambda: [own_weight_sums(self._space)],
        )
        self._learn_of_updates(norms.along)
        finding = self._search(policy, spike, step, limits, norms)
        action = self._decide(spike, finding)
        norm = self._act(action.taken, grad_norm, policy, finding)
        if action.taken == "mask" and (why := self._contradicted(finding, norm)):
            action = replace(action, taken="skip", reason=why)
            norm = self._act("skip", norm, policy)
        return Settled(finding, step, norms, action, norm)

    def _search(
        self, policy: Policy, spike: Spike, step: HostStep, limits: dict[str, Any], norms: SpikeNorms
    ) -> SearchResult:
        increments = norms.increments
        if increments is not None and len(increments) != step.num_micro_batches:
            increments = None  # the gradient was reduced once, after the last micro-batch
        again, is_first = getattr(self._step, "anew", None), len(self.norms) == 1
        if again is None and not is_first and isinstance(self._step, LossReplay):
            again = partial(with_live_loss, self._step)  # old log-probs are of the weights of the update's first step
        clues = Clues(
            reference=self._keeper.reference,
            updates=self.updates,
            number=policy.global_step,
            factor=1.0 / self._step.loss_scale,
            again=again,
            is_first=is_first,
            squares=norms.summed[1:],
        )
        has_room = limits["strategy"] == self.settings.search.strategy  # for another copy of the weights
        with heartbeat(f"searching step {policy.global_step}") if self.ranks.is_first else nullcontext():
            return localize(
                step,
                self._space,
                self.ranks,
                spike,
                self._clip_scale(spike.grad_norm),
                increments,
                policy.typical,
                groups=policy.groups,
                squares=norms.squares,
                find_link=partial(find_broken_link, clues) if has_room else None,
                **limits,
            )

    def _decide(self, spike: Spike, finding: SearchResult) -> Action:
        obstacle = self._step.obstacle or None
        if self.trainer.scales_loss and not math.isfinite(spike.grad_norm):
            obstacle = "the fp16 scaler has already found the gradient to overflow"
        cure = None if finding.healer is None else finding.healer.line
        assert finding.certificate is not None  # a search ends with one
        return decide(self.settings.action, spike, finding.certificate, finding.tokens, obstacle, cure)

    def _act(
        self, taken: str, grad_norm: torch.Tensor, policy: Policy, finding: SearchResult | None = None
    ) -> torch.Tensor:
        """Put into ``.grad`` what the step is to take; returns its norm."""
        if taken == "observe":
            return grad_norm
        if finding is None or taken not in ("mask", "heal"):
            # without gradients the optimizer skips every parameter: no moment, no weight decay, no step count
            zero = self.ranks.run_local_synced(lambda: torch.zeros((), device=self._space.device))
            self._space.clear()
            return zero
        gradient, rng = self._space.take(), self._space.forward_state()
        try:
            prober = Prober(self._step, self._space, self.ranks)
            if taken == "mask":
                prober.compute_without(finding.tokens)
            else:
                name = finding.healer.name if finding.healer is not None else ""
                prober.compute_recorded(records_under(prober.step, self.ranks, name, policy.groups))
            return self.ranks.run_collective(self.trainer.clip)
        except BaseException:  # also Ctrl-C
            self._space.put(gradient)
            raise
        finally:
            rng.restore()

    def _contradicted(self, finding: SearchResult, norm: torch.Tensor) -> str:
        """Return why a masked gradient's norm cannot be the certificate's; empty where it is."""
        certificate, masked = finding.certificate, float(norm)
        if certificate is None or certificate.norm_after is None:
            return ""
        allowed = (certificate.error_bound or 0.0) + _MASK_TOLERANCE * certificate.norm_after
        (difference,) = self.ranks.max([abs(masked - certificate.norm_after)])
        if difference <= allowed:
            return ""
        return (
            f"masking is not possible: run without the culprits the norm is {masked:.4g}, and "
            f"{certificate.norm_after:.4g} by the certificate; perhaps the loop dropped a micro-batch"
        )

    def _gather(self, policy: Policy, spike: Spike, settled: Settled) -> bool:
        """Gather the event; the first process keeps it for the report."""
        context = SpikeContext(
            place=policy.place(len(self.norms) - 1),
            spike=spike,
            finding=settled.finding,
            step=settled.step,
            space=self._space,
            ranks=self.ranks,
            squares=settled.norms.squares / self._clip_scale(spike.grad_norm) ** 2,
            weight_sums=settled.norms.more[0],
            history=settled.norms.history,
            action=settled.action,
            clip_limit=self.trainer.clip_limit,
            checkpoint=self.trainer.save_weights(policy.global_step),
            head_square=settled.norms.summed[0],
            takes_what_is_not_finite=self.trainer.takes_what_is_not_finite,
            budget=self.settings.budget,
            keeps_all=self.settings.evidence.bundle == "full",
        )
        event = raw_event(context)
        if event is not None:
            self.events.append(event)
        return True

    @staticmethod
    def _take_back(room: SearchMemory) -> None:
        try:
            room.close()
        except Exception as error:
            raise LostRank("the optimizer's state does not fit back onto the device after a search") from error

    # ---- after the step

    def end_update(self) -> None:
        """Let go of the update's parameters; what there is to report stays until the next."""
        self._tracker.end_update()
        del self._space

    def report(self, learned: Any = None) -> RankReport:
        """Make this process's report of the last update.

        Args:
            learned: the stabilizers' state, to be sent along by the first process.
        """
        num_norms = len(self.head_squares)
        scalars = _read(self.head_squares + self.updates.open)
        self._learn_of_updates(scalars[num_norms:])
        report = RankReport(
            self.ranks.process,
            tuple(self.norms),
            tuple(scalars[:num_norms].tolist()),
            self.coefficient,
            self.num_failures,
            peak_bytes=self._peak.most(self._device),
        )
        if not self.ranks.is_first:
            return report
        return replace(report, outcomes=tuple(self.outcomes), events=tuple(self.events), learned=learned)

    @property
    def coefficient(self) -> float:
        """Median |d loss / d log_prob| of this rank's tokens in the update's first mini-batch, where it is not 0.

        This waits for the device, so read it after the step.
        """
        step, self._first_step = self._first_step, None
        try:
            if step is not None and step.num_micro_batches:  # a rank may have none where others have some
                on_device = [typical_sizes(step, i) for i in range(step.num_micro_batches)]
                self._coefficient = median_size([values for values in to_host(on_device) if values is not None])
        except (torch.OutOfMemoryError, MemoryError):  # the last update's will do
            logger.warning("gradloc: there is no memory to read the coefficients of this step's log-probs")
        return self._coefficient

    # ---- whether training itself is sound

    def check_replicas(self) -> None:
        """Check that replicas are kept equal: by their layout, and, once a step was taken, by their weights."""
        problem = ""
        if self._num_updates == 1 and not self._space.are_summed:
            self.switch_off()  # norms differ by rank: one would search, and wait for the others
            problem = (
                "FSDP1 with fsdp_size=1 sums no gradients over ranks: each trains a model of its own. gradloc is off; "
                "set actor.fsdp_config.fsdp_size=-1"
            )
        elif self._num_updates == 2 and self._space.num_replicas > 1 and not self.is_off:
            diverged = self.run_safely(lambda: diverged_params(self._space, self.ranks))
            if diverged:
                problem = (
                    f"replicas hold other weights in {plural(len(diverged), 'parameter')}, {diverged[0]} first: a rank "
                    "loaded others, skipped a step, or its gradients are not summed"
                )
        if problem and self.ranks.is_first:
            logger.error("gradloc: %s", problem)

    def _learn_of_updates(self, noted: torch.Tensor) -> None:
        """Warn of an update that went far, and of weights that something else changed."""
        for warning in self.updates.learn(noted):
            if self.ranks.is_first:
                logger.warning("gradloc: %s; the next norms show what that does", warning)

    # ---- helpers

    @property
    def is_off(self) -> bool:
        """Whether no step is looked into any more, after too many failures or by :meth:`switch_off`."""
        return self.num_failures >= _MAX_FAILURES

    def switch_off(self) -> None:
        """Look into no further step."""
        self.num_failures = _MAX_FAILURES

    def _clip_scale(self, norm: float) -> float:
        """Return the factor by which torch and FSDP have clipped the gradient in ``.grad``."""
        if self.trainer.is_unclipped:
            return 1.0
        return min(1.0, self.trainer.clip_limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def run_safely(self, joint: Callable[[], T], taken: str = "") -> T | None:
        """Run a stage on all ranks; returns its result, or None where it failed, which is logged and counted.

        Args:
            joint: runs on all ranks.
            taken: the log's words about the step, where it was acted on before.
        """
        try:
            return self.ranks.run_collective(joint)
        except LostRank:
            logger.critical(
                "gradloc: this rank cannot go on in step with its peers; it ends now, so that nothing hangs until a "
                "time-out. Switch gradloc off to train without it.",
                exc_info=True,
            )
            logging.shutdown()
            os._exit(1)
        except Exception:
            self.num_failures += 1
            logger.exception(
                "gradloc: looking into step %s failed (failure %d of %d before it switches itself off); %s",
                self._policy.global_step if self._policy else "?",
                self.num_failures,
                _MAX_FAILURES,
                taken or "training goes on with the gradient it had",
            )
            return None


def _read(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return these scalars on the host, in a single read."""
    return torch.stack([each.to(scalars[0].device) for each in scalars]).cpu() if scalars else torch.zeros(0)


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Log every half minute what the run waits for, so that it does not look stuck."""
    started, is_over = time.perf_counter(), threading.Event()

    def log() -> None:
        while not is_over.wait(_HEARTBEAT_S):
            logger.warning("gradloc: %s, for %.0f s so far; training waits", what, time.perf_counter() - started)

    threading.Thread(target=log, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
