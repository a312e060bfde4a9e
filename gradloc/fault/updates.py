# SPDX-License-Identifier: Apache-2.0
"""Measure how far each step of the optimizer moves the weights, and undo the last one.

A healthy step costs one norm of all weights and a sample of their elements, a few kernels on the device; nothing is
communicated and nothing is read until the next step. From the samples before and after a step follows how far it moved
each parameter, whatever the optimizer. From the norms follows whether something else changed the weights since.

For each step, in order: :meth:`Updates.note_weights`, the optimizer's own step, a hook of ours behind it
(``_after_step``), and, once the host reads the device anyway, :meth:`Updates.learn`. The others answer at a spike.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.gradients import GradientSpace
from ..core.memory_plans import SAMPLE
from ..core.ranks import Ranks
from ..core.sharding import local_shard
from ..explain.numbers import number

logger = logging.getLogger(__name__)

Undo = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any]], torch.Tensor | None]
"""Called with a parameter's local shard, its optimizer state, and its group's hyperparameters as they were in the last
step; returns the shard before that step, or None where it cannot be known."""

_WINDOW = 64  # steps whose movements are remembered
_LEAST = 16  # steps before a movement is judged
FAR = 8.0
"""Times the usual movement from which a healthy step's is announced. Adam's own vary within a factor of 2."""
_OUTSIDE = 1e-4  # relative change of a weight's norm between two steps; sums on two devices differ by less
_OFF = 0.05  # of the sampled movement: an undo that is off by more is none
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a weight, that its own precision may hide
_ONE_GRADIENT = 0.2  # relative difference up to which m^2 (1 - beta2) and v (1 - beta1)^2 are equal
_TINY = 1e-60  # in place of 0, where it divides
_KEPT = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad", "decoupled_weight_decay")


@dataclass
class OptimizerStep:
    """One step of the optimizer."""

    number: int
    """The trainer's number of the step."""
    groups: list[dict[str, Any]]
    """Each group's hyperparameters, as the step used them."""
    norms: Sequence[torch.Tensor]
    """Norms of each parameter's sampled movement, of its sample before the step, and of this process' part of it after
    the step: 3 num_params scalars, float32, on the device."""
    skipped: frozenset[int] = frozenset()
    """Numbers of the parameters without a gradient, which it left alone."""


class Movement(NamedTuple):
    """What one step did, on this process."""

    number: int
    """The trainer's number of the step."""
    relative: torch.Tensor
    """|dw| / |w| of each parameter, float64 (num_params,)."""
    size: float
    """|dw| / |w| of all parameters together."""
    rate: float
    """The largest learning rate of its groups."""
    decay: float
    """Their largest weight decay."""
    changed: list[tuple[int, float]]
    """Parameters whose norms changed after it, outside of the optimizer, and by which factor."""


class Movements(deque[Movement]):
    """The movements of the last steps, oldest first."""

    def usual_settings(self) -> tuple[float, float]:
        """Return the medians of the learning rate and of weight decay over the steps before the last."""
        before = [(each.rate, each.decay) for each in self][:-1] or [(0.0, 0.0)]
        rate, decay = (statistics.median_low(each) for each in zip(*before, strict=True))
        return rate, decay

    def usual(self) -> torch.Tensor | None:
        """Return the median movement of each parameter over the steps before the last; None without enough."""
        before = [each.relative for each in self][:-1]
        return torch.stack(before).median(0).values if len(before) >= _LEAST else None


class Moments(NamedTuple):
    """Measures of the last step's size that Adam's moments m (first) and v (second) give."""

    decay_share: float
    """Weight decay's fraction of the squared movement."""
    are_of_one_gradient: bool
    """Whether m^2 (1 - beta2) = v (1 - beta1)^2 in nearly all elements, as where both hold a single gradient."""
    ratio: float
    """Root mean square of m / sqrt(v): at most about 1 where second moments fit their gradients; 0 without moments."""


class Updates:
    """Follows the steps of one optimizer.

    Args:
        undo: for optimizers that :func:`undone` does not know.
    """

    def __init__(self, undo: Undo | None = None):
        self.undo = undo
        self.number = 0
        """The number of the step that is being made."""
        self.last: OptimizerStep | None = None
        self.movements = Movements(maxlen=_WINDOW)
        self.names: list[str] = []
        self._params: list[torch.nn.Parameter] = []
        self._places: list[slice] = []
        self._pointers: list[int] = []
        self._shards: list[torch.Tensor] = []
        self._runs: list[torch.Tensor] = []
        """Views of the sampled elements in the weights themselves; the next three are copies of them, float32."""
        self._before: list[torch.Tensor] = []
        """The sample before the last step."""
        self._sample: list[torch.Tensor] = []
        """The sample after the last step."""
        self._present: list[torch.Tensor] = []
        """The sample when the next step is about to be taken: something else may have changed it since."""
        self._is_present = False
        """Whether ``_present`` is of the step that comes next."""
        self._pending: OptimizerStep | None = None
        """The last step, until :meth:`note_weights` has noted the weights' norms once more."""
        self._open: list[tuple[OptimizerStep, list[torch.Tensor]]] = []
        """Steps and their scalars on the device, until :meth:`learn` gets them on the host."""
        self._optimizer: Any = None
        self._handle: Any = None
        self.has_failed = False

    @property
    def optimizer(self) -> Any:
        """The optimizer that is followed; None before one is."""
        return self._optimizer

    def follow(self, optimizer: Any, space: GradientSpace) -> None:
        """Follow this optimizer's steps of these parameters from here on; called again, it changes nothing."""
        if self.has_failed or type(space) is not GradientSpace:
            return
        plain = getattr(optimizer, "optimizer", optimizer)  # in accelerate's
        if plain is None or not hasattr(plain, "register_step_post_hook"):
            return
        if plain is not self._optimizer or [*map(id, space.params)] != [*map(id, self._params)]:
            self.close()
            self._optimizer, self._params, self.names = plain, list(space.params), list(space.names)
            self._places, self._pointers = [_place(param) for param in self._params], []
            self._look_up()
            self._before, self._sample, self._present = (_copies(self._runs) for _ in range(3))
            self._handle = plain.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Follow nothing any more."""
        if self._handle is not None:
            self._handle.remove()
        self._optimizer = self._handle = self.last = self._pending = None
        self._params, self._shards, self._open, self.movements = [], [], [], Movements(maxlen=_WINDOW)

    # ---- a healthy step

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.has_failed:
            return
        try:
            self._note()
        except Exception as error:  # training goes on
            self.has_failed = True
            self.close()
            logger.warning(
                "gradloc: the optimizer's steps cannot be followed (%s); faults of an update stay unnamed", error
            )

    def _note(self) -> None:
        """Note the step that was just taken."""
        # swap buffers, so that nothing is allocated; without a sample from just before, compare with the last step's
        if self._is_present:
            self._before, self._present = self._present, self._before
        else:
            self._before, self._sample = self._sample, self._before
        self._is_present = False
        self._look_up()
        torch._foreach_copy_(self._sample, self._runs)
        moved = torch._foreach_sub(self._sample, self._before)
        norms = _norms([*moved, *self._before, *self._shards])
        skipped = frozenset(i for i, param in enumerate(self._params) if param.grad is None)
        groups = [
            {name: _copied(group[name]) for name in _KEPT if name in group} for group in self._optimizer.param_groups
        ]
        self.last = self._pending = OptimizerStep(self.number, groups, norms, skipped)

    def _look_up(self) -> None:
        """Find the weights where they are now: a trainer may have moved them to another device and back."""
        shards = [local_shard(param) for param in self._params]
        pointers = [shard.data_ptr() for shard in shards]
        if pointers != self._pointers:
            self._pointers = pointers
            self._shards = [shard.detach() if shard.numel() else shard.new_zeros(1) for shard in shards]
            self._runs = [
                shard.view(-1)[place] if shard.is_contiguous() and place.stop > place.start else shard.new_zeros(1)
                for shard, place in zip(self._shards, self._places, strict=True)
            ]

    @torch.no_grad()
    def note_weights(self) -> None:
        """Note the sample and the weights' norms before the next step is taken, for :meth:`learn`; reads nothing."""
        done, self._pending = self._pending, None
        if self._params:
            self._look_up()
            torch._foreach_copy_(self._present, self._runs)  # so that a movement is the optimizer's alone
            self._is_present = True
        if done is not None and self._params:
            now = _norms(self._shards)
            self._open.append((done, [*done.norms, *now]))

    @property
    def open(self) -> list[torch.Tensor]:
        """Scalars noted and not learned yet, on the device: 4 num_params for each step."""
        return [scalar for _, scalars in self._open for scalar in scalars]

    def learn(self, noted: torch.Tensor) -> list[str]:
        """Learn what the steps did.

        Args:
            noted: :attr:`open` as one tensor, on the host.

        Returns:
            Warnings, of steps that went far and of weights that something else changed; mostly none.
        """
        steps, self._open = [step for step, _ in self._open], []
        by_step: Sequence[torch.Tensor] = list(noted.view(len(steps), -1)) if steps else []
        warnings = [self._learn(step, scalars) for step, scalars in zip(steps, by_step, strict=True)]
        return [warning for warning in warnings if warning]

    def _learn(self, step: OptimizerStep, scalars: torch.Tensor) -> str:
        """Remember one step; returns its warning, mostly ""."""
        moved, weights, norms_after, norms_now = scalars.double().view(4, -1)
        relative = moved / weights.clamp(min=_TINY)
        size = float(moved.norm() / weights.norm().clamp(min=_TINY))
        changed = []
        for index, (after, now) in enumerate(zip(norms_after.tolist(), norms_now.tolist(), strict=True)):
            if abs(now - after) > _OUTSIDE * after:
                changed.append((index, now / after if after > 0 else math.inf))
        rate = max((float(group.get("lr", 0.0)) for group in step.groups), default=0.0)
        decay = max((float(group.get("weight_decay", 0.0)) for group in step.groups), default=0.0)
        earlier = list(self.movements)
        self.movements.append(Movement(step.number, relative, size, rate, decay, changed))
        if len(earlier) < _LEAST:
            return ""
        if changed and 2 * sum(bool(each.changed) for each in earlier) <= len(earlier):
            index, factor = max(changed, key=lambda each: abs(math.log(max(each[1], _TINY))))
            return (
                f"the weights of {self.names[index]} changed after step {step.number}, outside of the optimizer: "
                f"their norm is {number(factor, 3)} times as large"
            )
        usual = statistics.median(each.size for each in earlier)
        if size > FAR * usual > 0:
            return f"step {step.number} moved the parameters {number(size / usual, 3)} times as far as usual"
        return ""

    # ---- at a spike

    def ratios(self, ranks: Ranks) -> torch.Tensor | None:
        """Return how many times as far as usual the last step moved each parameter, float64 (num_params,).

        Medians over the ranks' own parts; None where too few steps are known. All ranks call this together.
        """
        usual = self.movements.usual()
        if not ranks.all(usual is not None):
            return None
        assert usual is not None
        last = self.movements[-1].relative
        mine = torch.where(usual > 0, last / usual.clamp(min=_TINY), torch.ones_like(last))
        by_rank = torch.stack([torch.tensor(each, dtype=torch.float64) for each in ranks.gather(mine.tolist())])
        return by_rank.median(0).values

    def far(self, ranks: Ranks, since: int = 0) -> list[tuple[int, float]]:
        """Return (number, times as far as usual) of the recent steps that moved the parameters far, the same on every
        rank: by the first process' part. All ranks call this together.

        Args:
            ranks: all.
            since: number of the first step to look at.
        """
        found = list[tuple[int, float]]()
        if len(self.movements) > _LEAST:
            usual = max(statistics.median(each.size for each in self.movements), _TINY)
            recent = [*self.movements][-_LEAST:]
            times = ((each.number, each.size / usual) for each in recent if each.number >= since)
            found = [(number, factor) for number, factor in times if factor >= FAR]
        return ranks.broadcast_from(0, found)

    def outside(self, ranks: Ranks) -> tuple[int, dict[str, float]] | None:
        """Return the first step after which something else than the optimizer changed weights, and the factor of each
        changed norm by parameter; None where nothing did, or where that is usual in this run.

        All ranks call this together.
        """
        before, recent = [*self.movements][:-_LEAST], [*self.movements][-_LEAST:]
        is_usual = sum(bool(each.changed) for each in before) * 4 > len(before)
        found: dict[int, float] = {}
        first = -1
        for each in [] if is_usual else recent:
            for index, factor in each.changed:
                first = each.number if first < 0 else first
                found[index] = found.get(index, 1.0) * factor
        gathered = ranks.gather((first, found))
        joined: dict[str, float] = {}
        for _, part in gathered:
            for index, factor in part.items():
                name = self.names[index]
                joined[name] = max(joined.get(name, 1.0), factor, key=lambda value: abs(math.log(max(value, _TINY))))
        firsts = [number for number, part in gathered if part]
        return (min(firsts), joined) if joined else None

    @torch.no_grad()
    def before_last(self, index: int, saved: torch.Tensor, count: float) -> torch.Tensor | None:
        """Return a parameter's local shard before the last step, by the optimizer's state; None where it is not known.

        Args:
            index: of the parameter.
            saved: its local shard now.
            count: its number of steps, from :meth:`num_steps`.
        """
        if self.last is None or self._optimizer is None:
            return None
        if index in self.last.skipped:
            return saved
        held = self._held(index, saved, count)
        return saved if held is None else (self.undo or undone)(saved, *held)

    def _held(self, index: int, like: torch.Tensor, count: float) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return a parameter's optimizer state on this process and its hyperparameters in the last step; None where
        another optimizer has it."""
        group = self._group(index)
        if group is None:
            return None
        kept = self._optimizer.state.get(self._params[index], {})
        state = {name: _local(value, like) for name, value in kept.items()}
        if "step" in state:
            state["step"] = count
        is_decoupled = "adamw" in type(self._optimizer).__name__.lower()
        return state, {"decoupled_weight_decay": is_decoupled, **group}

    def num_steps(self) -> list[float]:
        """Return how many steps each parameter has had, read from the device at once."""
        state = {} if self._optimizer is None else self._optimizer.state
        given = [state.get(param, {}).get("step", 0.0) for param in self._params]
        device = next((each.device for each in given if isinstance(each, torch.Tensor)), None)
        return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in given]).tolist()

    def moments(self, ranks: Ranks) -> Moments:
        """Return what Adam's moments say of the last step, by the first process' shards. All ranks call it together."""
        return ranks.broadcast_from(0, ranks.run_local_synced(self._moments))

    @torch.no_grad()
    def _moments(self) -> Moments:
        counts = self.num_steps() if self.last is not None and self._params else []
        sums, num_elements = torch.zeros(4, dtype=torch.float64), 0
        for index, (param, count) in enumerate(zip(self._params if counts else (), counts, strict=True)):
            weight = local_shard(param)
            state, group = self._held(index, weight, count) or ({}, {})
            if "exp_avg_sq" not in state or not weight.numel():
                continue
            rate, direction = float(group["lr"]), adam_direction(state, group)
            first, second = (float(each) for each in group["betas"])
            single = state["exp_avg"].float().square() * ((1 - second) / (1 - first) ** 2)
            square = state["exp_avg_sq"].float()
            is_single = (single - square).abs() <= _ONE_GRADIENT * square
            decay = rate * _decoupled_decay(group) * weight.float()
            parts = ((rate * direction).square(), decay.square(), direction.square(), is_single)
            sums = sums.to(weight.device) + torch.stack([part.sum().double() for part in parts])
            num_elements += weight.numel()
        moved, decayed, squares, num_single = sums.tolist()
        if not num_elements:
            return Moments(0.0, False, 0.0)
        share = decayed / max(decayed + moved, _TINY)
        return Moments(share, num_single > 0.9 * num_elements, math.sqrt(squares / num_elements))

    def _group(self, index: int) -> dict[str, Any] | None:
        """Return a parameter's hyperparameters in the last step; None where another optimizer has it."""
        assert self.last is not None
        for group, kept in zip(self._optimizer.param_groups, self.last.groups, strict=True):
            if any(self._params[index] is each for each in group["params"]):
                return kept
        return None

    def under_decay(self, index: int, saved: torch.Tensor, before: torch.Tensor, decay: float) -> torch.Tensor:
        """Return a parameter's local shard as AdamW's last step would have left it under a smaller weight decay.

        Args:
            index: of the parameter.
            saved: its local shard now.
            before: its local shard before the last step.
            decay: the other weight decay; one that is larger than the group's own changes nothing.
        """
        group = self._group(index)
        if group is None:
            return saved
        was = float(group["weight_decay"])
        return saved.float() + float(group["lr"]) * (was - min(decay, was)) * before.float()

    def is_undone(self, index: int, saved: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return whether the last step took this parameter from ``before`` to where it is, by the sample taken then: a
        bool scalar, still on the device."""
        if not saved.numel() or (self.last is not None and index in self.last.skipped):
            return torch.ones((), dtype=torch.bool, device=saved.device)
        place, was = self._places[index], self._before[index]
        if place.stop - place.start != len(was):
            return torch.zeros((), dtype=torch.bool, device=saved.device)
        moved = self._sample[index] - was
        off = (saved.flatten()[place].float() - before.flatten()[place].float()) - moved
        rounding = _ROUNDING.get(saved.dtype, 0.0) * was
        return off.norm() <= _OFF * moved.norm() + rounding.norm()


def undone(weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> torch.Tensor | None:
    """Return a weight before the last step of torch's Adam, AdamW or SGD with momentum; None for other steps.

    AdamW: w_before = (w + lr m_hat / (sqrt(v_hat) + eps)) / (1 - lr * weight_decay), with both moments of after the
    step; Adam the same without the division; SGD: w_before = w + lr * buffer, where nothing looks ahead (Nesterov).

    Args:
        weight: any shape, after the step; the result is in float32.
        state: of the optimizer, after the step.
        group: hyperparameters of the step.
    """
    rate = float(group["lr"])
    if "exp_avg" in state and "exp_avg_sq" in state:
        decay = rate * _decoupled_decay(group)
        return (weight.float() + rate * adam_direction(state, group)) / (1 - decay) if decay != 1 else None
    if state.get("momentum_buffer") is not None and not group.get("nesterov"):
        return weight.float() + rate * state["momentum_buffer"].float()
    return None


def adam_direction(state: Mapping[str, Any], group: Mapping[str, Any]) -> torch.Tensor:
    """Return m_hat / (sqrt(v_hat) + eps), float32, from Adam's state after a step with these hyperparameters."""
    step, (first, second) = float(state["step"]), (float(each) for each in group["betas"])
    square = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    scale = (square.float() / (1 - second**step)).sqrt_().add_(float(group["eps"]))
    return state["exp_avg"].float() / scale / (1 - first**step)


def _decoupled_decay(group: Mapping[str, Any]) -> float:
    """Return the weight decay that shrinks weights, as AdamW's does; 0 where it is a part of the gradient."""
    return float(group.get("weight_decay", 0.0)) if group.get("decoupled_weight_decay") else 0.0


def _local(value: Any, like: torch.Tensor) -> Any:
    """Return an entry of an optimizer's state on this process and the weight's device."""
    if not isinstance(value, torch.Tensor):
        return value
    shard = local_shard(value)
    return shard.to(like.device) if shard.dim() else shard


def _place(param: torch.nn.Parameter) -> slice:
    """Return the run of elements that is sampled of a parameter's local shard: its middle."""
    count = local_shard(param).numel()
    first = max(count - SAMPLE, 0) // 2
    return slice(first, min(first + SAMPLE, count))


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [*torch._foreach_norm(tensors, dtype=torch.float64 if is_double else torch.float32)]


def _copies(runs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [run.detach().float().clone() for run in runs]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
