# SPDX-License-Identifier: Apache-2.0
"""verl's critic with a localizer riding along: its values stand where the actor's log-probs stand."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from verl.trainer.ppo import core_algos
from verl.workers.critic import DataParallelPPOCritic, dp_critic

from ...core.ranks import Ranks
from ...core.step import Details, Numerics, Outputs, OwnLoss, Recorded, RngState, record
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.wire import Policy, RankReport
from ...touched import replaced
from ..verl_common.losses import changed, weights_of
from ..verl_common.precise import precise_readout
from ..verl_common.watch import Clipping, Watch, device_of

_CLIPPING = Clipping(dp_critic)


class WatchedCritic(DataParallelPPOCritic):
    """verl's critic; an update that comes with a policy is watched, any other goes through verl's code alone."""

    _watch: "CriticWatch | None" = None

    def update_critic(self, data: Any) -> dict[str, Any]:
        policy = data.meta_info.get(POLICY_KEY)
        if policy is None:
            return super().update_critic(data)
        if self._watch is None:
            self._watch = CriticWatch(self, policy.settings)
        select = data.select  # verl takes the keys that it knows
        data.select = lambda batch_keys, **given: select(batch_keys=[*batch_keys, ROW_KEY], **given)
        with self._watch.update(policy):
            return super().update_critic(data)

    def report(self) -> RankReport:
        """What this process has to say of the last update that was watched."""
        return self._watch.report()


class CriticWatch(Watch):
    """What verl's critic calls, in the order of the methods."""

    scaler = None
    module = property(lambda self: self.critic.critic_module)
    optimizer = property(lambda self: self.critic.critic_optimizer)
    grad_clip = property(lambda self: self.critic.config.grad_clip)

    def __init__(self, critic: DataParallelPPOCritic, settings: Any):
        self.critic = critic
        super().__init__(settings, Ranks(device=device_of()))
        self._step: CriticStep | None = None

    @contextmanager
    def update(self, policy: Policy) -> Iterator[None]:
        """Around an update that comes with a policy."""
        self.begin(policy)
        try:
            with replaced(self.critic, _forward_micro_batch=self._forward, _optimizer_step=self._optimizer_step):
                yield
        finally:
            self._step = None
            self.end({})

    def _forward(self, micro_batch: dict[str, Any]) -> torch.Tensor:
        if self._step is None:
            self._step = CriticStep(self.critic, self.ranks.size)
            self.localizer.begin_mini_batch(self._step)
        else:
            self.after_backward()  # of the one before
        return self._step.train_forward(micro_batch)

    def _optimizer_step(self) -> torch.Tensor:
        self.after_backward()
        with _CLIPPING.replaced(self.module, self.before_step):
            return DataParallelPPOCritic._optimizer_step(self.critic)

    def before_step(self) -> torch.Tensor:
        try:
            return super().before_step()
        finally:
            self._step = None

    def clip_by_verl(self) -> torch.Tensor:
        return _CLIPPING.clip(self.module, self.grad_clip)


class CriticStep(OwnLoss):
    """One mini-batch of verl's critic, replayable: the :class:`~...core.step.TrainingStep` of the search."""

    def __init__(self, critic: DataParallelPPOCritic, dp_size: int):
        self.critic, self.dp_size = critic, dp_size
        # verl's critic sees to the dtype itself, whatever its weights are kept in
        self.numerics = Numerics(torch.bfloat16, weight=1.0 / dp_size)
        self.micro_batches: list[dict[str, Any]] = []
        self._recorded: list[Recorded] = []

    def train_forward(self, micro_batch: dict[str, Any]) -> torch.Tensor:
        """Run and record training's forward of the next micro-batch; changes nothing."""
        self.micro_batches.append(micro_batch)
        self._recorded.append(Recorded(rng=RngState(torch.device(self.critic.device_name)), is_value=True))
        values = DataParallelPPOCritic._forward_micro_batch(self.critic, micro_batch)
        record(self._recorded[-1], Outputs(values))
        return values

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def recorded(self, micro_batch: int) -> Recorded:
        return self._recorded[micro_batch]

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # verl's critic reduces the gradient after every micro-batch

    def rows(self, micro_batch: int) -> list[int]:
        return self.micro_batches[micro_batch][ROW_KEY].tolist()

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch]["response_mask"].bool()

    def details(self, micro_batch: int) -> Details:
        inputs, mode = self.micro_batches[micro_batch], self.critic.config.loss_agg_mode
        mask = inputs["response_mask"]
        weights = weights_of(mask, lambda losses: 0.5 * core_algos.agg_loss(losses, mask, mode))
        return Details(inputs["values"], weights * self._loss_scale_factor(micro_batch) / self.dp_size)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        is_training = torch.is_grad_enabled()
        with nullcontext() if is_training else precise_readout(self.critic.critic_module, self.numerics.dtype):
            return Outputs(DataParallelPPOCritic._forward_micro_batch(self.critic, self.micro_batches[micro_batch]))

    def forward_bytes(self) -> int:
        return 0

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        inputs = {**self.micro_batches[micro_batch], **(tensors or {})}
        config = changed(self.critic.config, **settings)
        values = self._recorded[micro_batch].log_prob.detach().float().clone().requires_grad_()
        with torch.enable_grad():
            loss, _ = core_algos.compute_value_loss(
                vpreds=values,
                values=inputs["values"],
                returns=inputs["returns"],
                response_mask=inputs["response_mask"],
                cliprange_value=config.cliprange_value,
                loss_agg_mode=config.loss_agg_mode,
            )
        return Outputs(*torch.autograd.grad(loss * self._loss_scale_factor(micro_batch), values))

    # ---- inside

    def _loss_scale_factor(self, micro_batch: int) -> float:
        if self.critic.config.use_dynamic_bsz:
            return len(self.micro_batches[micro_batch]["responses"]) / self.critic.config.ppo_mini_batch_size
        return 1 / self.critic.gradient_accumulation
