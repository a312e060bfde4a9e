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
"""What verl's actor calls. With :mod:`driver`, the only code here that knows verl's types.

The hook rides along in every update: it keeps each micro-batch's log-probs, hooks their coefficients and notes the
random state, all without extra computation or communication. When a norm breaks the policy that the driver sent, it
replays parts of the step through verl's own loss to find the tokens, and hands the driver a raw event.
"""

import logging
import math
import os
from typing import Any, Optional

import torch

from verl.utils.device import get_device_id

from .bisect import Culprit
from .gradients import GradientSpace
from .layers import kind_of, layer_of, norms_by
from .probe import Recorded, RngState, let_through, record
from .ranks import Ranks
from .search import Finding, localize
from .trigger import Spike, StepPolicy, spike_kind

__all__ = ["ActorHook", "ActorStep", "build_hook", "pop_events"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

ROW_KEY = "gradloc_row"
POLICY_KEY = "gradloc"
EVENTS_KEY = "gradloc_events"
_MAX_FAILURES = 3


def build_hook(actor: Any) -> Optional["ActorHook"]:
    """The actor's hook, or None: for a reference policy and while ``spike_detection`` is off."""
    if actor.actor_optimizer is None or not actor.config.get("spike_detection", False):
        return None
    return ActorHook(actor)


def pop_events(metrics: dict[str, Any]) -> dict[str, Any]:
    """Take the raw events out of an update's metrics, as meta info of their own (only rank 0 has any)."""
    events = metrics.pop(EVENTS_KEY, None)
    return {} if events is None else {EVENTS_KEY: events}


class ActorStep:
    """One mini-batch of verl's actor, replayable: the :class:`~.probe.TrainingStep` of the search."""

    def __init__(self, actor: Any, micro_batches: list, temperature: float, on_policy: bool, dp_size: int):
        self.actor = actor
        self.micro_batches = micro_batches
        self.temperature = temperature
        self.on_policy = on_policy
        self.dp_size = dp_size
        self.num_micro_batches = len(micro_batches)
        self._recorded: list[Optional[Recorded]] = [None] * len(micro_batches)

    def before_forward(self, micro_batch: int) -> None:
        self._recorded[micro_batch] = Recorded(rng=RngState(torch.device(self.actor.device_name)))

    def after_forward(self, micro_batch: int, log_prob: torch.Tensor, entropy: Optional[torch.Tensor]) -> None:
        record(self._recorded[micro_batch], log_prob, entropy)

    def recorded(self, micro_batch: int) -> Recorded:
        return self._recorded[micro_batch]

    def rows(self, micro_batch: int) -> list[int]:
        """Where the micro-batch's rows stand in the driver's batch; empty when the driver did not say."""
        batch = self.micro_batches[micro_batch].batch
        return batch[ROW_KEY].tolist() if ROW_KEY in batch.keys() else []

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].batch["response_mask"].bool().to(get_device_id())

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        """Read off verl's own aggregation, which is linear in the token losses: its derivative by each of them."""
        from verl.trainer.ppo.core_algos import agg_loss

        config = self.actor.config
        mask = self.micro_batches[micro_batch].batch["response_mask"].to(get_device_id())
        token_losses = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
        loss = agg_loss(token_losses, mask, config.loss_agg_mode, **config.global_batch_info)
        (weights,) = torch.autograd.grad(loss, token_losses)
        return weights.nan_to_num() * self.actor._loss_scale_factor(mask) / self.dp_size

    def backward(self, micro_batch: int, selected: Optional[torch.Tensor]) -> None:
        self._recorded[micro_batch].rng.restore()
        inputs = self._inputs(micro_batch)
        entropy, log_prob = self.actor._forward_for_loss(inputs, self.temperature)
        if selected is not None:
            log_prob, entropy = let_through(selected, log_prob), let_through(selected, entropy)
        loss = self._loss(inputs, log_prob, entropy)
        scaler = self.actor.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    @property
    def loss_scale(self) -> float:
        """What the fp16 scaler multiplies the loss, and so every probe's gradient, with."""
        return 1.0 if self.actor.scaler is None else self.actor.scaler.get_scale()

    def kl_coefficients(self, micro_batch: int) -> Optional[torch.Tensor]:
        """d (KL term) / d log_prob (B, T) from the recorded log-probs: no forward. None without a KL loss."""
        if not self.actor.config.use_kl_loss:
            return None
        recorded = self._recorded[micro_batch]
        log_prob = recorded.log_prob.clone().requires_grad_()
        terms: dict[str, torch.Tensor] = {}
        self._loss(self._inputs(micro_batch), log_prob, recorded.entropy, terms)
        (coefficients,) = torch.autograd.grad(terms["kl"], log_prob)
        return coefficients

    def _inputs(self, micro_batch: int) -> dict[str, Any]:
        data = self.micro_batches[micro_batch].to(get_device_id())
        return {**data.batch, **data.non_tensor_batch}

    def _loss(self, inputs, log_prob, entropy, terms=None) -> torch.Tensor:
        scratch = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}
        return self.actor._micro_batch_loss(inputs, log_prob, entropy, self.on_policy, scratch, {}, terms)


class ActorHook:
    """Watches the actor's updates and localizes the spikes that the driver's policy asks for."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.config = actor.config.gradloc
        device = get_device_id() if actor.device_name != "cpu" else "cpu"
        self.ranks = Ranks(device=device, replicas=actor.ulysses_sequence_parallel_size)
        self._policy: Optional[StepPolicy] = None
        self._step: Optional[ActorStep] = None
        self._events: list[dict[str, Any]] = []
        self._norms: list[float] = []
        self._num_failures = 0
        self._num_localized = 0
        self._position = (0, 0)

    # ---- the seams, in the order in which update_policy calls them

    def begin_update(self, data: Any) -> list[str]:
        """Take the step's policy; returns the batch keys that the actor must carry along."""
        policy = data.meta_info.get(POLICY_KEY)
        self._policy = None if policy is None else StepPolicy(**policy)
        self._events, self._norms, self._num_localized = [], [], 0
        return [ROW_KEY] if ROW_KEY in data.batch.keys() else []

    def begin_mini_batch(
        self, epoch: int, mini_batch: int, micro_batches: list, temperature: float, on_policy: bool
    ) -> None:
        self._position = (epoch, mini_batch)
        self._step = ActorStep(self.actor, micro_batches, temperature, on_policy, self.ranks.size)

    def before_forward(self, micro_batch: int) -> None:
        self._step.before_forward(micro_batch)

    def after_forward(self, micro_batch: int, log_prob: torch.Tensor, entropy: Optional[torch.Tensor]) -> None:
        self._step.after_forward(micro_batch, log_prob, entropy)

    def before_step(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Look into the step if it spikes.

        Args:
            grad_norm: scalar, before clipping; ``.grad`` holds the clipped gradient.

        Returns:
            The norm of the gradient that is in ``.grad`` now, before clipping.
        """
        norm = float(grad_norm)
        self._norms.append(norm)
        spike = self._find_spike(norm)
        if spike is not None:
            self._num_localized += 1
            try:
                self._events.append(self._localize(spike))
            except Exception:
                self._num_failures += 1
                logger.exception(
                    "gradloc: localizing the spike at step %s failed (failure %d of %d before it switches itself off); "
                    "training goes on with the gradient it had",
                    self._policy.global_step,
                    self._num_failures,
                    _MAX_FAILURES,
                )
        self._step = None
        return grad_norm

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add what every rank reports alike, and on the first process the raw events."""
        metrics["actor/grad_norm_max"] = [max(self._norms, key=lambda norm: math.inf if norm != norm else norm)]
        metrics["gradloc/failures"] = [self._num_failures]
        if self.ranks.is_first and self._events:
            metrics[EVENTS_KEY] = self._events

    # ---- inside

    def _find_spike(self, norm: float) -> Optional[Spike]:
        policy = self._policy
        if policy is None or self._num_failures >= _MAX_FAILURES or self._num_localized >= policy.max_events:
            return None
        epoch, mini_batch = self._position
        threshold, tau = policy.thresholds[mini_batch], policy.tau[mini_batch]
        num_tokens = policy.num_tokens[mini_batch]
        kind = spike_kind(norm, threshold, policy.kind)
        if kind is not None:
            return Spike(kind, norm, threshold, tau, num_tokens)
        if policy.force and (epoch, mini_batch) == (0, 0):
            return Spike("forced", norm, None, None, num_tokens)
        return None

    def _localize(self, spike: Spike) -> dict[str, Any]:
        space = GradientSpace(self.actor.actor_module)
        grad_clip = self.actor.config.grad_clip
        # how torch and FSDP clip: the gradient in .grad is this times the true one
        clip_scale = min(1.0, grad_clip / (spike.grad_norm + 1e-6)) if math.isfinite(spike.grad_norm) else 1.0
        search = self.config.search
        finding = localize(
            self._step,
            space,
            self.ranks,
            spike,
            clip_scale,
            search.strategy,
            self.actor.config.bisect_budget_steps,
            search.max_culprits,
        )
        spike_squares = space.squares() / clip_scale**2
        return self._raw_event(spike, finding, space.names, spike_squares, clip_scale)

    def _raw_event(
        self, spike: Spike, finding: Finding, names: list[str], spike_squares: torch.Tensor, clip_scale: float
    ) -> dict[str, Any]:
        """All that the ranks know of the event, in plain numbers; the driver adds what it knows and writes."""
        epoch, mini_batch = self._position
        step, culprits = self._step, finding.result.culprits
        holders = sorted({culprit.token.micro_batch for culprit in culprits})
        local = self.ranks.agree(lambda: self._local_evidence(culprits, holders, names, spike_squares, clip_scale))
        gathered = self.ranks.gather(local)
        owned = {key: value for part in gathered for key, value in part["culprits"].items()}
        return {
            "step": {
                "global_step": self._policy.global_step,
                "epoch": epoch,
                "mini_batch": mini_batch,
                "num_mini_batches": len(self._policy.num_tokens),
                "num_micro_batches": step.num_micro_batches,
                "world_size": self.ranks.num_processes,
                "dp_size": self.ranks.size,
                "sp_size": self.ranks.replicas,
            },
            "trigger": {
                "kind": spike.kind,
                "grad_norm": spike.grad_norm,
                "threshold": spike.threshold,
                "tau": spike.tau,
                "num_tokens": spike.num_tokens,
                "history": self._policy.history or None,
            },
            "search": _search_record(finding, self.actor.config.bisect_budget_steps),
            "culprits": [owned[index] for index in range(len(culprits))],
            "sequences": [sequence for part in gathered for sequence in part["sequences"]],
            "certificate": vars(finding.certificate),
            "action": {
                "requested": self.config.action.mode,
                "taken": "observe",
                "reason": "the step goes on unchanged",
            },
            "layers": norms_by(layer_of, names, spike_squares),
            "kinds": norms_by(kind_of, names, spike_squares),
            "shares": None,
            "residual_coefficient_norm": math.sqrt(sum(part["coefficient_square"] for part in gathered)),
            "layout": [
                {"rank": rank, "micro_batch": index, "rows": rows, "rng": rng}
                for rank, part in enumerate(gathered)
                for index, rows, rng in part["layout"]
            ],
            "temperature": step.temperature,
            "on_policy": step.on_policy,
        }

    def _local_evidence(self, culprits: list[Culprit], holders, names, spike_squares, clip_scale) -> dict[str, Any]:
        """This rank's part of the event: its own culprits, and the rows of the micro-batches that hold any."""
        step, mine = self._step, {}
        kl = {index: step.kl_coefficients(index) for index in holders}
        for number, culprit in enumerate(culprits):
            if culprit.token.rank == self.ranks.rank:
                mine[number] = self._culprit_record(culprit, kl, names, spike_squares, clip_scale)
        square = 0.0
        for index in range(step.num_micro_batches):
            coefficient = step.recorded(index).log_prob_coefficient
            if coefficient is not None:
                square += coefficient[step.token_mask(index)].double().square().sum().item() * self._per_rank**2
        square -= sum((entry["coefficients"]["log_prob"] or 0.0) ** 2 for entry in mine.values())
        return {
            "culprits": mine,
            "coefficient_square": max(square, 0.0),
            "sequences": self._sequences(culprits),
            "layout": [(index, step.rows(index), step.recorded(index).rng.cpu.numpy()) for index in holders],
        }

    def _sequences(self, culprits: list[Culprit]) -> list[dict[str, Any]]:
        """Per-token numbers of this rank's sequences that hold a culprit."""
        step, found = self._step, {}
        for culprit in culprits:
            if culprit.token.rank != self.ranks.rank:
                continue
            index = culprit.token.micro_batch
            mask = step.token_mask(index)
            row = int(mask.flatten().nonzero()[culprit.token.index]) // mask.shape[1]
            recorded, rows = step.recorded(index), step.rows(index)

            def of(values: Optional[torch.Tensor], factor: float = 1.0, row: int = row) -> Optional[list[float]]:
                return None if values is None else (values[row].float() * factor).tolist()

            found[index, row] = {
                "rank": self.ranks.rank,
                "micro_batch": index,
                "micro_batch_row": row,
                "row": rows[row] if rows else None,
                "log_prob": of(recorded.log_prob),
                "entropy": of(recorded.entropy),
                "coefficient": of(recorded.log_prob_coefficient, self._per_rank),
                "share": None,
            }
        return list(found.values())

    def _culprit_record(self, culprit: Culprit, kl, names, spike_squares, clip_scale) -> dict[str, Any]:
        step, token = self._step, culprit.token
        index = token.micro_batch
        mask = step.token_mask(index)
        flat = int(mask.flatten().nonzero()[token.index])
        row, position = divmod(flat, mask.shape[1])
        recorded = step.recorded(index)
        rows = step.rows(index)

        def at(values: Optional[torch.Tensor], factor: float = 1.0) -> Optional[float]:
            return None if values is None else float(values[row, position]) * factor

        batch = step.micro_batches[index].batch
        old = recorded.log_prob if step.on_policy and not self._uses_rollout_log_probs() else batch["old_log_probs"]
        difference = (recorded.log_prob - old.to(recorded.log_prob.device))[row][mask[row]]
        spike_square = float(spike_squares.sum())
        dot = float(culprit.dots.sum()) / clip_scale
        return {
            "span": "token",
            "rank": token.rank,
            "micro_batch": index,
            "micro_batch_row": row,
            "row": rows[row] if rows else None,
            "positions": [position],
            "log_prob": at(recorded.log_prob),
            "old_log_prob_used": at(old),
            "entropy": at(recorded.entropy),
            "sequence_mean_log_ratio": float(difference.mean()),
            "coefficients": {
                "log_prob": at(recorded.log_prob_coefficient, self._per_rank),
                "kl": at(kl[index], 1.0 / self.ranks.size),
                "entropy": at(recorded.entropy_coefficient, self._per_rank),
            },
            "loss_weight": at(step.token_weights(index)),
            "grad_norm": culprit.norm,
            "threshold": culprit.threshold,
            "share": dot / spike_square if math.isfinite(spike_square) and spike_square > 0 else None,
            "layers": norms_by(layer_of, names, culprit.squares),
        }

    @property
    def _per_rank(self) -> float:
        """From the coefficient of a rank's own (scaled) loss to that of the step's: FSDP averages the ranks."""
        return 1.0 / (self.ranks.size * self._step.loss_scale)

    def _uses_rollout_log_probs(self) -> bool:
        return bool(self.actor.config.get("use_rollout_log_probs", False))


def _search_record(finding: Finding, budget: int) -> dict[str, Any]:
    return {
        "strategy": finding.strategy,
        "status": finding.status,
        "stop_reason": finding.result.stop_reason,
        "tau": finding.tau,
        "budget": budget,
        "forwards": finding.num_forwards,
        "backwards": finding.num_backwards,
        "seconds": finding.seconds,
        "path": [
            {
                "phase": entry.phase,
                "micro_batch": entry.part.micro_batch,
                "ranks": [entry.part.first_rank, entry.part.end_rank],
                "tokens": None if entry.part.end_token is None else [entry.part.first_token, entry.part.end_token],
                "num_tokens": entry.num_tokens,
                "norm": entry.norm,
                "threshold": entry.threshold,
                "verdict": entry.verdict,
            }
            for entry in finding.result.path
        ],
    }
