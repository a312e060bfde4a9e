# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What verl's actor calls, at its seams.

The hook rides along in every update: it keeps each micro-batch's log-probs, hooks their coefficients, notes the random
state and local norms, all without communication. When a norm breaks the policy that the driver sent, it replays parts
of the step through verl's own loss to find the tokens, does what the configuration asks, and hands the driver a raw
event. A failure in here is logged, counted and steps aside, on all ranks together.
"""

import logging
import math
import os
from typing import Any, Optional

import torch
from verl.utils.device import get_device_id

from ..core.actions import decide
from ..core.gradients import GradientSpace
from ..core.memory import check_memory
from ..core.probe import Prober, RngState
from ..core.ranks import LostRank, Ranks
from ..core.tracker import NormTracker
from ..core.trigger import Spike, StepPolicy, spike_kind
from ..evidence.fingerprint import fingerprint
from ..evidence.gather import Place, raw_event
from ..evidence.store import EventStore
from ..search.find import Finding, localize
from ..stabilize import STABILIZER_KEY
from .step import ROW_KEY, ActorStep

__all__ = ["EVENTS_KEY", "POLICY_KEY", "ROW_KEY", "ActorHook", "ActorStep", "build_hook", "pop_events"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

POLICY_KEY = "gradloc"
EVENTS_KEY = "gradloc_events"
_MAX_FAILURES = 3


def build_hook(actor: Any) -> Optional["ActorHook"]:
    """The actor's hook, or None: for a reference policy and while ``spike_detection`` is off."""
    if actor.actor_optimizer is None or not actor.config.get("spike_detection", False):
        return None
    return ActorHook(actor)


def pop_events(metrics: dict[str, Any]) -> dict[str, Any]:
    """Take what is no metric out of an update's metrics, as meta info of its own: the raw events and the stabilizers'
    statistics. Only rank 0 has any."""
    return {key: metrics.pop(key) for key in (EVENTS_KEY, STABILIZER_KEY) if key in metrics}


class ActorHook:
    """Watches the actor's updates and localizes the spikes that the driver's policy asks for."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.config = actor.config.gradloc
        device = get_device_id() if actor.device_name != "cpu" else "cpu"
        self.ranks = Ranks(device=device, replicas=actor.ulysses_sequence_parallel_size)
        self._tracker = NormTracker(self.config.search.layer_window)
        self._policy: StepPolicy | None = None
        self._space: GradientSpace | None = None
        self._step: ActorStep | None = None
        self._position = (0, 0)
        self._norms: list[float] = []
        self._events: list[dict[str, Any]] = []
        self._num_looked_into = 0
        self._num_failures = 0

    # ---- the seams, in the order in which update_policy calls them

    def begin_update(self, data: Any) -> list[str]:
        """Take the step's policy; returns the batch keys that the actor must carry along."""
        policy = data.meta_info.get(POLICY_KEY)
        self._policy = None if policy is None else StepPolicy(**policy)
        self._space = GradientSpace(self.actor.actor_module)
        self._events, self._norms, self._num_looked_into = [], [], 0
        self._tracker.begin_update()
        return [ROW_KEY] if ROW_KEY in data.batch.keys() else []

    def begin_mini_batch(
        self, epoch: int, mini_batch: int, micro_batches: list, temperature: float, on_policy: bool
    ) -> None:
        self._position = (epoch, mini_batch)
        self._step = ActorStep(self.actor, micro_batches, temperature, on_policy, self.ranks.size)
        self._tracker.begin_mini_batch()

    def before_forward(self, micro_batch: int) -> None:
        self._step.before_forward(micro_batch)

    def after_forward(self, micro_batch: int, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        self._step.after_forward(micro_batch, log_prob, entropy)

    def after_backward(self) -> None:
        self._tracker.after_backward(self._space)

    def before_step(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Look into the step if it spikes.

        Args:
            grad_norm: scalar, before clipping; ``.grad`` holds the clipped gradient.

        Returns:
            The norm of the gradient that the step will take, before clipping: the same unless ``action.mode`` put
            another gradient (or none) into ``.grad``.
        """
        norm = float(grad_norm)
        self._norms.append(norm)
        spike = self._find_spike(norm)
        if spike is not None:
            self._num_looked_into += 1
            grad_norm = self._look_into(spike, grad_norm)
        self._tracker.after_mini_batch(is_spike=spike is not None or not math.isfinite(norm))
        self._step = None
        return grad_norm

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add what every rank reports alike, and on the first process the raw events."""
        self._tracker.end_update()
        self._space = None
        metrics["actor/grad_norm_max"] = [max(self._norms, key=lambda norm: math.inf if norm != norm else norm)]
        metrics["gradloc/failures"] = [self._num_failures]
        if self.ranks.is_first and self._events:
            metrics[EVENTS_KEY] = self._events

    # ---- inside

    def _find_spike(self, norm: float) -> Spike | None:
        policy = self._policy
        if policy is None or self._num_failures >= _MAX_FAILURES or self._num_looked_into >= policy.max_events:
            return None
        epoch, mini_batch = self._position
        threshold, tau = policy.thresholds[mini_batch], policy.tau[mini_batch]
        num_tokens = policy.num_tokens[mini_batch]
        kind = spike_kind(norm, threshold, policy.kind)
        if kind == "non_finite" and self._is_overflow():
            return None
        if kind is not None:
            return Spike(kind, norm, threshold, tau, num_tokens)
        if policy.force and (epoch, mini_batch) == (0, 0):
            return Spike("forced", norm, None, None, num_tokens)
        return None

    def _is_overflow(self) -> bool:
        """Whether the fp16 scaler's scale alone made the norm non-finite: its everyday business, and no spike."""
        if self.actor.scaler is None:
            return False
        step = self._step
        is_finite = self.ranks.agree(lambda: all(step.has_finite_loss(i) for i in range(step.num_micro_batches)))
        return self.ranks.all(is_finite)

    def _look_into(self, spike: Spike, grad_norm: torch.Tensor) -> torch.Tensor:
        """Localize and act; whatever goes wrong in a way that all ranks know of leaves the step as it was."""
        try:
            event, taken_norm = self._localize_and_act(spike)
        except LostRank:
            logger.critical(
                "gradloc: this rank cannot go on in step with its peers; it ends now, so that nothing hangs until a "
                "time-out. Switch spike_detection off to train without gradloc.",
                exc_info=True,
            )
            logging.shutdown()
            os._exit(1)
        except Exception:
            self._num_failures += 1
            logger.exception(
                "gradloc: looking into the spike at step %s failed (failure %d of %d before it switches itself off); "
                "training goes on with the gradient it had",
                self._policy.global_step,
                self._num_failures,
                _MAX_FAILURES,
            )
            return grad_norm
        self._events.append(event)
        return grad_norm if taken_norm is None else taken_norm

    def _localize_and_act(self, spike: Spike) -> tuple[dict[str, Any], torch.Tensor | None]:
        space, step, search = self._space, self._step, self.config.search
        self.ranks.agree(lambda: check_memory(space))
        # how torch and FSDP clip: the gradient in .grad is this times the true one
        measures_only = self.actor.stabilizer is not None and self.actor.stabilizer.clips_layers
        grad_clip = math.inf if measures_only else self.actor.config.grad_clip
        clip_scale = min(1.0, grad_clip / (spike.grad_norm + 1e-6)) if math.isfinite(spike.grad_norm) else 1.0
        finding = localize(
            step,
            space,
            self.ranks,
            spike,
            clip_scale,
            search.strategy,
            self.actor.config.bisect_budget_steps,
            search.max_culprits,
            self._tracker.increments(space, self.ranks, step.loss_scale),
        )
        taken, reason = self._decide(spike, finding)
        epoch, mini_batch = self._position
        policy = self._policy
        event = raw_event(
            Place(policy.global_step, epoch, mini_batch, len(policy.num_tokens), policy.history, policy.stage),
            spike,
            finding,
            step,
            self.ranks,
            space.names,
            space.squares() / clip_scale**2,
            self._tracker.history(space, self.ranks),
            {"requested": self.config.action.mode, "taken": taken, "reason": reason},
            self.actor.config.bisect_budget_steps,
            keeps_all=self.config.evidence.bundle == "full",
        )
        event["fingerprint"] = fingerprint(space)
        if self.config.evidence.checkpoint == "before_step":
            event["checkpoint"] = self._save_weights(policy.global_step)
        return event, self._act(taken, finding)

    def _decide(self, spike: Spike, finding: Finding) -> tuple[str, str]:
        action = self.config.action
        overflowed = self.actor.scaler is not None and not math.isfinite(spike.grad_norm)
        return decide(
            action.mode,
            finding.certificate,
            finding.result.tokens,
            spike.num_tokens,
            action.max_masked_tokens,
            action.max_masked_share,
            is_rehearsal=spike.kind == "forced",
            obstacle="the fp16 scaler has already found the gradient to overflow" if overflowed else None,
        )

    def _act(self, taken: str, finding: Finding) -> torch.Tensor | None:
        """Put into ``.grad`` what the step is to take; returns its norm, None when that is unchanged."""
        if taken == "observe":
            return None
        if taken == "mask":
            rng = RngState(self._space.params[0].device)
            Prober(self._step, self._space, self.ranks).compute_without(finding.result.tokens)
            rng.restore()
            return self.actor._clip_grad_norm()
        # without gradients the optimizer skips every parameter: no moment, no weight decay, no step count
        self._space.clear()
        return torch.zeros((), device=self._space.params[0].device)

    def _save_weights(self, global_step: int) -> str | None:
        """Save the weights of the event with verl's own checkpoint writer; returns the folder, None past the cap."""
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        contents = {"save_contents": ["model"], "load_contents": ["model"]}
        manager = FSDPCheckpointManager(self.actor.actor_module, checkpoint_config=contents)
        root = os.path.abspath(os.path.expanduser(self.actor.config.bisect_dump_dir))
        size_gb = self.ranks.agree(lambda: EventStore(root).size_gb() if self.ranks.is_first else 0.0)
        if self.ranks.max([size_gb])[0] >= self.config.evidence.max_gb:
            logger.warning("gradloc: %s holds gradloc.evidence.max_gb or more, so no weights are saved", root)
            return None
        folder = os.path.join(root, "weights", f"global_step_{global_step}", "actor")
        manager.save_checkpoint(folder, global_step=global_step)
        return folder
