# SPDX-License-Identifier: Apache-2.0
"""verl's V1 trainers with the driver's side of GradLoc: policies sent with a batch, events taken out of the metrics."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import response_to_nested

from ...config import fix_dump_dir, settings_in
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.metrics import joined
from ...loop.wire import Policy, RankReport
from ...names import refuse_unknown_names
from ...reweighting.advantages import kept_share, reweight
from ...reweighting.stages import STAGE_MASK_KEY, Stage, update_in_stages
from ...stabilize.memory import build_memory
from ..verl_common.driver import VerlDriver, build_driver
from ..verl_common.reports import reports_of
from ..verl_common.trainer import TrainerParts, build_monitor, reweighting_of
from .analysis.trainer import build_analysis
from .batch import fetch, put, view_of
from .config import check_critic, check_features
from .critic import watch_critic
from .engine import report_of_actor, report_of_model, watch_actor
from .touches import check_verl


class _Role(NamedTuple):
    """Of a model: where verl keeps its workers, their mesh, and what is run in each: first of all, and for a report."""

    group: str
    mesh: str
    watch: Callable[[Any], Any]
    ask: Callable[[Any], Any]


class Update(NamedTuple):
    """An update of a model that verl is about to make."""

    trainer: Any
    batch: Any
    """verl's ``KVBatchMeta``."""
    run: Callable[[dict[str, Any]], Any]
    """verl's own method, which adds to the metrics that it is given."""


_ACTOR = _Role("actor_rollout_wg", "actor", watch_actor, report_of_actor)
_CRITIC = _Role("critic_wg", "train", watch_critic, report_of_model)


class TrainerSide(TrainerParts):
    """What a V1 trainer calls, in the order of the methods; each part does nothing while it is off.

    Args:
        config: the trainer's whole config.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """

    def __init__(self, config: Any):
        refuse_unknown_names(config)
        self.config = config
        self.settings = settings_in(config, omega_conf_to_dataclass)
        alpha, lopti = reweighting_of(config)
        analysis = build_analysis(config, self.settings)
        if check_features(config, self.settings, lopti, analysis):
            check_verl("trainer")
        fix_dump_dir(config, self.settings.root)
        if self.settings.critic != "off":
            check_critic(config)
        clip = OmegaConf.select(config.actor_rollout_ref.actor, "optim.clip_grad")
        memory = build_memory(self.settings.stabilize, "actor_rollout_ref.actor.optim.clip_grad", clip)
        monitor = build_monitor(config, clip)
        super().__init__(alpha=alpha, lopti=lopti, stabilizers=memory, monitor=monitor, analysis=analysis)
        self._watched_groups: set[str] = set()
        self._num_updates = 0
        self._of_updates: dict[str, list[dict[str, float]]] = {}  # the present step's metrics, by model

    def begin(self, tokenizer: Any) -> None:
        """Once the tokenizer is there, before the workers are."""
        if self.settings.enable:
            self.spikes = build_driver(self.config, self.settings, tokenizer)
            mode = self.settings.action.mode
            print(f"gradloc: on ({mode}); events go to {self.spikes.writer.store.root}", flush=True)
        if self.settings.critic != "off":
            self.critic = build_driver(self.config, self.settings, tokenizer, "critic")
            print(f"gradloc: on for the critic ({self.settings.critic}): {self.critic.writer.store.root}", flush=True)

    def check_data(self, num_prompts: int) -> None:
        """Once the data is there: whether an analysis has enough of it."""
        if self.analysis is not None:
            self.analysis.check_data(self.config, num_prompts)

    def filter(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Once rewards are known, before verl deals the rows out: those to train on."""
        return batch if self.analysis is None else self.analysis.filter(batch, metrics)

    def after_advantages(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Right after the estimator: reweight the advantages."""
        if self.alpha == 0:
            return
        found = fetch(batch, ["advantages", "old_log_probs", "response_mask"])
        padded = found.to_padded_tensor()
        before, mask = padded["advantages"], padded["response_mask"].bool()
        after = reweight(before, padded["old_log_probs"], self.alpha)
        fields = {"advantages": response_to_nested(after, found["response_mask"])}
        put(batch, fields)
        metrics["advantage_reweighting/kept_share"] = kept_share(before, after, mask)

    def update(self, update: Update, metrics: dict[str, Any]) -> Any:
        """The actor's update through verl's own method, once or in Lopti's two stages; before it, what is analysed."""
        batch = update.batch
        if self.analysis is not None:
            self._watch(update.trainer, _ACTOR)
            if self.analysis.run(update.trainer, batch, metrics):
                raise _Ended(metrics)
        if self.lopti is None:
            return self._update_once(update, metrics)
        data = fetch(batch, ["advantages", "old_log_probs", "response_mask"])
        whole, rows = data.to_padded_tensor(), data["response_mask"]

        def update_stage(stage: Stage, keeps_lr_schedule: bool) -> dict[str, Any]:
            fields = {"advantages": whole["advantages"] * stage.mask, STAGE_MASK_KEY: stage.mask.float()}
            put(batch, {name: response_to_nested(values, rows) for name, values in fields.items()})
            found: dict[str, Any] = {}
            self._update_once(update, found, stage.name, keeps_lr_schedule)
            return {name: [value] for name, value in found.items()}

        found = update_in_stages(self.lopti, whole["old_log_probs"], whole["response_mask"], update_stage)
        put(batch, {"advantages": data["advantages"]})
        metrics.update(reduce_metrics(found))
        return batch

    def update_critic(self, update: Update, metrics: dict[str, Any]) -> Any:
        """The critic's update, likewise."""
        if self.critic is None:
            return update.run(metrics)
        return self._watched(self.critic, _CRITIC, update, metrics)

    def _update_once(
        self, update: Update, metrics: dict[str, Any], stage: str = "", keeps_lr_schedule: bool = False
    ) -> Any:
        if self.spikes is None and self.stabilizers is None and self.lopti is None:
            return update.run(metrics)
        learned = None if self.stabilizers is None else self.stabilizers.to_send
        told = {"keeps_lr_schedule": keeps_lr_schedule, "learned": learned}
        if self.spikes is not None:
            return self._watched(self.spikes, _ACTOR, update, metrics, stage, **told)
        self._through(_ACTOR, update, metrics, replace(self._silent_policy(update, stage), **told))
        return update.batch

    def _silent_policy(self, update: Update, stage: str) -> Policy:
        """Of an update in which no spike is looked for."""
        actor = self.config.actor_rollout_ref.actor
        rows = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        nothing = (None,) * (max(len(update.batch.keys) // rows, 1) * actor.ppo_epochs)
        self._num_updates += 1
        return Policy(
            update.trainer.global_steps,
            kind="off",
            num_tokens=(),
            thresholds=nothing,
            tau=nothing,
            max_events=0,
            stage=stage or None,
            update=self._num_updates,
            settings=self.settings,
        )

    def _watched(
        self, driver: VerlDriver, role: _Role, update: Update, metrics: dict[str, Any], stage: str = "", **told: Any
    ) -> Any:
        """An update that is looked into, with the events written."""
        trainer, batch = update.trainer, update.batch
        view = view_of(batch, is_critics=driver.model == "critic")
        dp_size = max(getattr(trainer, role.group)._dispatch_info[role.mesh]) + 1
        policy = driver.before_batch(view.tensors["response_mask"], trainer.global_steps, dp_size, stage)
        put(batch, {ROW_KEY: torch.arange(len(batch.keys)).unsqueeze(-1)})
        reports = self._through(role, update, metrics, replace(policy, **told))
        found = reduce_metrics(driver.after_update(reports, view))
        self._of_updates.setdefault(driver.model, []).append(found)
        metrics.update(found)
        return batch

    def _through(self, role: _Role, update: Update, metrics: dict[str, Any], policy: Policy) -> list[RankReport]:
        """An update through verl's own method, with a policy; what all processes have to say of it."""
        group, told = self._watch(update.trainer, role), update.batch.extra_info
        told[POLICY_KEY] = policy
        try:
            update.run(metrics)
        finally:
            told.pop(POLICY_KEY, None)
        reports = reports_of(group, role.ask)
        if role is _ACTOR and self.stabilizers is not None:
            self.stabilizers.after_update(reports[0].learned)
            names = reports[0].metrics
            found = {name: [value for report in reports for value in report.metrics[name]] for name in names}
            metrics.update(reduce_metrics(found))
        return reports

    def _watch(self, trainer: Any, role: _Role) -> Any:
        """A model's workers, whose engines are ours from the first time on."""
        group = getattr(trainer, role.group)
        if role.group not in self._watched_groups:
            group.execute_with_func_generator(role.watch)
            self._watched_groups.add(role.group)
        return group

    def after_metrics(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Once verl has computed the step's metrics, before they are logged."""
        for found in self._of_updates.values():
            if len(found) > 1:  # of which verl has taken means
                metrics.update(joined(found))
        self._of_updates = {}
        self.judge(view_of(batch), metrics, global_step)


class _Ended(Exception):
    """The run is to end here, with these metrics of the step."""

    def __init__(self, metrics: dict[str, Any]):
        super().__init__("exit_after_gradient_analysis")
        self.metrics = metrics


class _Watched:
    """Goes in front of one of verl's trainer classes."""

    def __init__(self, config: Any):
        self.gradloc = TrainerSide(config)
        super().__init__(config)  # type: ignore[call-arg]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self.gradloc.begin(self.tokenizer)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.gradloc.check_data(len(self.train_dataset))

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

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        except _Ended as ended:
            self.logger.log(data=ended.metrics, step=self.global_steps)
            self._shutdown_dump_executor()

    def _balance_batch(self, batch: Any, metrics: dict, *args: Any, **given: Any) -> Any:
        return super()._balance_batch(self.gradloc.filter(batch, metrics), metrics, *args, **given)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        self.gradloc.after_advantages(batch, metrics)
        return batch

    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        update = super()._update_critic
        return self.gradloc.update_critic(Update(self, batch, lambda found: update(batch, found)), metrics)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        update = super()._update_actor
        return self.gradloc.update(Update(self, batch, lambda found: update(batch, found)), metrics)

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
