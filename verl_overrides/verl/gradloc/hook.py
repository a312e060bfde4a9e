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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

from verl.utils.device import get_device_id

from .finding import Culprit, PathEntry
from .gradients import GradientSpace
from .layers import kind_of, layer_of, norms_by
from .probe import Recorded, RngState, let_through, record
from .ranks import Ranks
from .search import Finding, localize
from .selection import Token, mask_without
from .share import ShareMap
from .trigger import Spike, StepPolicy, spike_kind

__all__ = ["ActorHook", "ActorStep", "build_hook", "pop_events"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

ROW_KEY = "gradloc_row"
POLICY_KEY = "gradloc"
EVENTS_KEY = "gradloc_events"
_MAX_FAILURES = 3
_NOTABLE_SHARE = 0.05  # of the spike: sequences from here on are kept token by token
_MAX_SEQUENCES = 8


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

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.actor.param_dtype

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        self._recorded[micro_batch].rng.restore()
        with torch.no_grad(), _precise_readout(self.actor):
            entropy, log_prob = self.actor._forward_for_loss(self._inputs(micro_batch), self.temperature)
        return log_prob, entropy

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        recorded = self._recorded[micro_batch]
        # a coefficient is of this rank's own (scaled) loss; the step's gradient is the mean over the ranks
        factor = 1.0 / (self.dp_size * self.loss_scale)
        found = recorded.log_prob_coefficient
        log_prob = torch.zeros_like(recorded.log_prob) if found is None else found * factor
        entropy = recorded.entropy_coefficient
        return log_prob, None if entropy is None else entropy * factor

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


@contextmanager
def _precise_readout(actor: Any) -> Iterator[None]:
    """Compute the logits in float32 from the last hidden state while the model itself computes in half precision.

    verl's log-probs are rounded to the compute dtype where flash attention's cross entropy is absent, so a small
    change of a log-prob would read as none. Not possible with fused kernels, which never show the logits.
    """
    if actor.param_dtype == torch.float32 or actor.use_fused_kernels:
        yield
        return
    module = getattr(actor.actor_module, "_fsdp_wrapped_module", actor.actor_module)
    head = module.get_output_embeddings()

    def read_out(head: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=actor.device_name, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return torch.nn.functional.linear(inputs[0].float(), head.weight.float(), bias)

    handle = head.register_forward_hook(read_out)
    try:
        yield
    finally:
        handle.remove()


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
        return self._raw_event(spike, finding, space.names, spike_squares)

    def _raw_event(
        self, spike: Spike, finding: Finding, names: list[str], spike_squares: torch.Tensor
    ) -> dict[str, Any]:
        """All that the ranks know of the event, in plain numbers; the driver adds what it knows and writes."""
        epoch, mini_batch = self._position
        step, result = self._step, finding.result
        gathered = self.ranks.gather(self.ranks.agree(lambda: self._local_evidence(finding, names)))
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
            "culprits": [owned[index] for index in range(len(result.culprits))],
            "sequences": [sequence for part in gathered for sequence in part["sequences"]],
            "certificate": vars(finding.certificate),
            "action": {"requested": self.config.action.mode, "taken": "observe", "reason": "the step goes on as is"},
            "layers": norms_by(layer_of, names, spike_squares),
            "kinds": norms_by(kind_of, names, spike_squares),
            "shares": _shares_record(result.shares, [part["shares"] for part in gathered]),
            "residual_coefficient_norm": math.sqrt(sum(part["coefficient_square"] for part in gathered)),
            "layout": [
                {"rank": rank, "micro_batch": index, "rows": rows, "rng": rng}
                for rank, part in enumerate(gathered)
                for index, rows, rng in part["layout"]
            ],
            "temperature": step.temperature,
            "on_policy": step.on_policy,
        }

    def _local_evidence(self, finding: Finding, names: list[str]) -> dict[str, Any]:
        """This rank's part of the event: its own culprits, and the rows of the micro-batches that hold any."""
        step, result, rank = self._step, finding.result, self.ranks.rank
        holders = sorted({token.micro_batch for token in result.tokens})
        kl = {index: step.kl_coefficients(index) for index in holders}
        mine = {
            number: self._culprit_record(culprit, result.shares, kl, names)
            for number, culprit in enumerate(result.culprits)
            if culprit.tokens[0].rank == rank
        }
        square, shares = 0.0, []
        for index in range(step.num_micro_batches):
            kept = mask_without(result.tokens, index, rank, step.token_mask(index)) & step.token_mask(index)
            square += step.coefficients(index)[0][kept].double().square().sum().item()
            shares.append(0.0 if result.shares is None else float(result.shares.shares(index).sum()))
        return {
            "culprits": mine,
            "coefficient_square": square,
            "sequences": self._sequences(finding),
            "shares": shares,
            "layout": [(index, step.rows(index), step.recorded(index).rng.cpu.numpy()) for index in holders],
        }

    def _sequences(self, finding: Finding) -> list[dict[str, Any]]:
        """Per-token numbers of this rank's sequences that hold a culprit, or a notable share of the spike."""
        step, shares = self._step, finding.result.shares
        wanted = [
            (token.micro_batch, self._row_of(token)) for token in finding.result.tokens if token.rank == self.ranks.rank
        ]
        if shares is not None and shares.is_trusted:
            for index in range(step.num_micro_batches):
                per_row = shares.shares(index).sum(-1).abs()
                wanted += [(index, row) for row in (per_row >= _NOTABLE_SHARE).nonzero().squeeze(-1).tolist()]
        found = []
        for index, row in list(dict.fromkeys(wanted))[:_MAX_SEQUENCES]:
            recorded, rows = step.recorded(index), step.rows(index)

            def of(values: Optional[torch.Tensor], row: int = row) -> Optional[list[float]]:
                return None if values is None else values[row].float().tolist()

            found.append(
                {
                    "rank": self.ranks.rank,
                    "micro_batch": index,
                    "micro_batch_row": row,
                    "row": rows[row] if rows else None,
                    "log_prob": of(recorded.log_prob),
                    "entropy": of(recorded.entropy),
                    "coefficient": of(step.coefficients(index)[0]),
                    "share": None if shares is None else of(shares.shares(index)),
                }
            )
        return found

    def _row_of(self, token: Token) -> int:
        mask = self._step.token_mask(token.micro_batch)
        return int(mask.flatten().nonzero()[token.index]) // mask.shape[1]

    def _culprit_record(self, culprit: Culprit, shares: Optional[ShareMap], kl, names: list[str]) -> dict[str, Any]:
        step, index = self._step, culprit.tokens[0].micro_batch
        mask = step.token_mask(index)
        flat = mask.flatten().nonzero().squeeze(-1)[[token.index for token in culprit.tokens]].tolist()
        row, positions = flat[0] // mask.shape[1], [place % mask.shape[1] for place in flat]
        recorded, rows = step.recorded(index), step.rows(index)
        coefficients, entropy_coefficients = step.coefficients(index)
        peak = positions[int(coefficients[row, positions].abs().nan_to_num(nan=math.inf).argmax())]

        def at(values: Optional[torch.Tensor], factor: float = 1.0) -> Optional[float]:
            return None if values is None else float(values[row, peak]) * factor

        stored = step.micro_batches[index].batch["old_log_probs"].to(recorded.log_prob.device)
        old = recorded.log_prob if step.on_policy and not self._uses_rollout_log_probs() else stored
        share = culprit.share
        if share is None and shares is not None and shares.is_trusted:
            share = float(shares.shares(index)[row, positions].sum())
        return {
            "span": culprit.span,
            "rank": culprit.tokens[0].rank,
            "micro_batch": index,
            "micro_batch_row": row,
            "row": rows[row] if rows else None,
            "positions": positions,
            "peak": peak,
            "log_prob": at(recorded.log_prob),
            "old_log_prob_used": at(old),
            "entropy": at(recorded.entropy),
            "sequence_mean_log_ratio": float((recorded.log_prob - old)[row][mask[row]].mean()),
            "coefficients": {
                "log_prob": at(coefficients),
                "kl": at(kl[index], 1.0 / self.ranks.size),
                "entropy": at(entropy_coefficients),
            },
            "loss_weight": at(step.token_weights(index)),
            "grad_norm": culprit.norm,
            "is_exact": culprit.is_exact,
            "threshold": culprit.threshold,
            "share": share,
            "layers": {} if culprit.squares is None else norms_by(layer_of, names, culprit.squares),
        }

    def _uses_rollout_log_probs(self) -> bool:
        return bool(self.actor.config.get("use_rollout_log_probs", False))


def _shares_record(shares: Optional[ShareMap], by_rank: list[list[float]]) -> Optional[dict[str, Any]]:
    """The share of every micro-batch of every rank; None when they were not measured."""
    if shares is None:
        return None
    return {
        "closure": shares.closure,
        "is_trusted": shares.is_trusted,
        "micro_batches": [list(row) for row in zip(*by_rank, strict=True)],
    }


def _search_record(finding: Finding, budget: int) -> dict[str, Any]:
    result = finding.result
    return {
        "strategy": finding.strategy,
        "status": finding.status,
        "stop_reason": result.stop_reason,
        "tau": finding.tau,
        "budget": budget,
        "forwards": finding.num_forwards,
        "backwards": finding.num_backwards,
        "seconds": finding.seconds,
        "path": [_path_record(entry) for entry in result.path],
    }


def _path_record(entry: PathEntry) -> dict[str, Any]:
    part = entry.part
    is_interval = part is not None and part.end_token is not None
    return {
        "phase": entry.phase,
        "verdict": entry.verdict,
        "micro_batch": None if part is None else part.micro_batch,
        "ranks": None if part is None else [part.first_rank, part.end_rank],
        "tokens": [part.first_token, part.end_token] if is_interval else None,
        "num_tokens": entry.num_tokens,
        "norm": entry.norm,
        "threshold": entry.threshold,
        "note": entry.note,
    }
