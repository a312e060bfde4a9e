# SPDX-License-Identifier: Apache-2.0
"""verl's V1 trainers with the driver's side of GradLoc: policies sent with a batch, events taken out of the metrics."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import response_to_nested

from ...config import fix_dump_dir, settings_in
from ...health.monitor import Monitor, build_monitor
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.metrics import joined
from ...names import refuse_unknown_names
from ...record.state import load_states, save_states
from ...reweighting import reweight
from ..verl_common.driver import VerlDriver, build_driver
from ..verl_common.reports import reports_of
from .batch import fetch, view_of
from .config import check_critic, check_run, refuse_what_is_not_there
from .engine import report_of_actor, report_of_model
from .touches import check_verl

__all__ = ["TrainerSide", "watch_trainers"]


class _Role(NamedTuple):
    """Of a model: where verl keeps its workers, their mesh, and how they are asked for a report."""

    group: str
    mesh: str
    ask: Callable[[Any], Any]


_ACTOR = _Role("actor_rollout_wg", "actor", report_of_actor)
_CRITIC = _Role("critic_wg", "train", report_of_model)


class TrainerSide:
    """What a V1 trainer calls, in the order of the methods; each part does nothing while it is off.

    Args:
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """

    def __init__(self, config: Any):
        refuse_unknown_names(config)
        refuse_what_is_not_there(config)
        self.config = config
        self.settings = settings_in(config, omega_conf_to_dataclass)
        if self.settings.enable:
            check_verl("trainer")
            check_run("actor_rollout_ref.actor.gradloc.enable", config)
        fix_dump_dir(config, self.settings.root)
        self.monitor: Monitor | None = build_monitor(config)
        block = config.algorithm.get("advantage_reweighting")
        self.alpha = 0.0 if block is None else omega_conf_to_dataclass(block).alpha
        if self.settings.critic != "off":
            check_critic(config)
        self.spikes: VerlDriver | None = None
        self.critic: VerlDriver | None = None
        self._watches_critic = False
        self._of_updates: dict[str, list[dict[str, float]]] = {}  # the present step's metrics, by model
        self._checkpoint: str | None = None

    @property
    def _stateful(self) -> dict[str, Any]:
        parts = {"spikes": self.spikes, "critic": self.critic, "health": self.monitor}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def _drivers(self) -> list[VerlDriver]:
        return [driver for driver in (self.spikes, self.critic) if driver is not None]

    def begin(self, tokenizer: Any) -> None:
        """Once the tokenizer is there, before the workers are."""
        if self.settings.enable:
            self.spikes = build_driver(self.config, self.settings, tokenizer)
            mode = self.settings.action.mode
            print(f"gradloc: on ({mode}); events go to {self.spikes.writer.store.root}", flush=True)
        if self.settings.critic != "off":
            self.critic = build_driver(self.config, self.settings, tokenizer, "critic")
            print(f"gradloc: on for the critic ({self.settings.critic}): {self.critic.writer.store.root}", flush=True)

    def begin_fit(self, tracking: Any) -> None:
        """Once verl's ``Tracking`` is open: whom to tell events."""
        for driver in self._drivers:
            driver.teller.trackers = tracking.logger

    def load(self, folder: str) -> None:
        """Take the states back from the checkpoint that the trainer has resumed from."""
        self._remember(folder)
        load_states(self._stateful, folder)

    def after_advantages(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Right after the estimator: reweight the advantages."""
        if self.alpha == 0:
            return
        found = fetch(batch, ["advantages", "old_log_probs", "response_mask"])
        padded = found.to_padded_tensor()
        before, mask = padded["advantages"], padded["response_mask"].bool()
        after = reweight(before, padded["old_log_probs"], self.alpha)
        fields = {"advantages": response_to_nested(after, found["response_mask"])}
        _put(batch, fields)
        total = before[mask].abs().sum()
        metrics["advantage_reweighting/kept_share"] = float(after[mask].abs().sum() / total) if total > 0 else 1.0

    def update(self, trainer: Any, batch: Any, metrics: dict[str, Any], update: Callable[[], Any]) -> Any:
        """The actor's update, through verl's own method, with the policy sent and the events written."""
        if self.spikes is None:
            return update()
        return self._watched(self.spikes, trainer, _ACTOR, batch, metrics, update)

    def update_critic(self, trainer: Any, batch: Any, metrics: dict[str, Any], update: Callable[[], Any]) -> Any:
        """The critic's update, likewise."""
        if self.critic is None:
            return update()
        if not self._watches_critic:
            from .critic import watch_critic

            trainer.critic_wg.execute_with_func_generator(watch_critic)
            self._watches_critic = True
        return self._watched(self.critic, trainer, _CRITIC, batch, metrics, update)

    def _watched(
        self,
        driver: VerlDriver,
        trainer: Any,
        role: _Role,
        batch: Any,
        metrics: dict[str, Any],
        update: Callable[[], Any],
    ) -> Any:
        """An update through verl's own method."""
        view = view_of(batch, is_critics=driver.model == "critic")
        group = getattr(trainer, role.group)
        dp_size = max(group._dispatch_info[role.mesh]) + 1
        policy = driver.before_batch(view.tensors["response_mask"], trainer.global_steps, dp_size)
        _put(batch, {ROW_KEY: torch.arange(len(batch.keys)).unsqueeze(-1)})
        batch.extra_info[POLICY_KEY] = policy
        try:
            batch = update()
        finally:
            batch.extra_info.pop(POLICY_KEY, None)
        reports = reports_of(group, role.ask)
        if not reports:
            raise RuntimeError(
                "gradloc is switched on, and the workers' engine is not its own: install gradloc in the environment "
                "of every node, or leave +gradloc out."
            )
        found = reduce_metrics(driver.after_update(reports, view))
        self._of_updates.setdefault(driver.model, []).append(found)
        metrics.update(found)
        return batch

    def after_metrics(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Once verl has computed the step's metrics, before they are logged."""
        for found in self._of_updates.values():
            if len(found) > 1:  # of which verl has taken means
                metrics.update(joined(found))
        self._of_updates = {}
        if self.monitor is not None:
            self.monitor.observe(view_of(batch), metrics, global_step)
            if self._checkpoint is not None:  # written before the step had its metrics
                self.save(self._checkpoint)
        self._checkpoint = None

    def save(self, folder: str) -> None:
        """Put the parts' states beside a checkpoint."""
        if save_states(self._stateful, folder):
            self._checkpoint = folder
            self._remember(folder)

    def _remember(self, folder: str) -> None:
        for driver in self._drivers:
            driver.writer.last_checkpoint = os.path.abspath(folder)


def _put(batch: Any, fields: dict[str, torch.Tensor]) -> None:
    rows = TensorDict(fields, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows)
    if batch.fields is not None:
        batch.fields = [*dict.fromkeys([*batch.fields, *fields])]


class _Watched:
    """Goes in front of one of verl's trainer classes."""

    def __init__(self, config: Any):
        self.gradloc = TrainerSide(config)
        super().__init__(config)  # type: ignore[call-arg]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self.gradloc.begin(self.tokenizer)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps > 0:
            folder = self.config.trainer.default_local_dir
            if self.config.trainer.resume_mode == "resume_path":
                folder = os.path.dirname(os.path.normpath(self.config.trainer.resume_from_path))
            self.gradloc.load(os.path.join(folder, f"global_step_{self.global_steps}"))

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self.gradloc.begin_fit(self.logger)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        self.gradloc.after_advantages(batch, metrics)
        return batch

    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        update = super()._update_critic
        return self.gradloc.update_critic(self, batch, metrics, lambda: update(batch, metrics))

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        return self.gradloc.update(self, batch, metrics, lambda: super(_Watched, self)._update_actor(batch, metrics))

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self.gradloc.after_metrics(batch, metrics, global_steps)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self.gradloc.save(os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"))


def watch_trainers() -> None:
    """Put a subclass with the hook in the place of each trainer that verl has registered."""
    registry = trainer_base.TRAINER_REGISTRY
    for name, trainer in list(registry.items()):
        if not issubclass(trainer, _Watched):
            registry[name] = type(trainer.__name__, (_Watched, trainer), {"__module__": trainer.__module__})
