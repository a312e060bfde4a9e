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
from ...reweighting import STAGE_MASK_KEY, Stage, kept_share, reweight
from ...stabilize.memory import build_memory
from ..verl_common.driver import VerlDriver
from ..verl_common.reports import reports_of
from ..verl_common.trainer import TrainerParts, build_monitor, reweighting_of
from .analysis.trainer import build_analysis
from .batch import fetch, put, view_of
from .config import check_critic, check_features
from .engine import report_of_actor, report_of_model, watch_actor, watch_critic
from .touches import check_verl


class _Workers(NamedTuple):
    """Of a model: where the trainer keeps its workers, their mesh, and what is run in each of them."""

    group: str
    mesh: str
    watch: Callable[[Any], Any]
    """Once, before the first update."""
    ask: Callable[[Any], Any]
    """After each update, for a report."""


class Update(NamedTuple):
    """An update of a model that verl is about to make."""

    trainer: Any
    batch: Any
    """verl's ``KVBatchMeta``."""
    run: Callable[[dict[str, Any]], Any]
    """verl's own method, which adds to the metrics that it is given."""


_ACTOR = _Workers("actor_rollout_wg", "actor", watch_actor, report_of_actor)
_CRITIC = _Workers("critic_wg", "train", watch_critic, report_of_model)


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
        super().__init__(alpha, lopti, memory, build_monitor(config, clip), analysis)
        self._watched_groups: set[str] = set()
        self._num_updates = 0
        self._of_updates: dict[str, list[dict[str, float]]] = {}  # the present step's metrics, by model

    def begin(self, tokenizer: Any) -> None:
        """Once the tokenizer is there, before the workers are."""
        self.build_drivers(self.config, self.settings, tokenizer)
        for driver in self.drivers:
            mode, root = driver.settings.action.mode, driver.writer.store.root
            print(f"gradloc: on for the {driver.model} ({mode}); events go to {root}", flush=True)

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
        data = fetch(batch, ["advantages", "old_log_probs", "response_mask"])
        padded = data.to_padded_tensor()
        before, mask = padded["advantages"], padded["response_mask"].bool()
        after = reweight(before, padded["old_log_probs"], self.alpha)
        put(batch, {"advantages": response_to_nested(after, data["response_mask"])})
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
            of_stage: dict[str, Any] = {}
            self._update_once(update, of_stage, stage.name, keeps_lr_schedule)
            return {name: [value] for name, value in of_stage.items()}

        of_stages = self.lopti.update(whole["old_log_probs"], whole["response_mask"], update_stage)
        put(batch, {"advantages": data["advantages"]})
        metrics.update(reduce_metrics(of_stages))
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
        given = {"keeps_lr_schedule": keeps_lr_schedule, "learned": learned, "stage": stage or None}
        if self.spikes is not None:
            return self._watched(self.spikes, _ACTOR, update, metrics, **given)
        self._run(_ACTOR, update, metrics, replace(self._silent_policy(update), **given))
        return update.batch

    def _silent_policy(self, update: Update) -> Policy:
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
            update=self._num_updates,
            settings=self.settings,
        )

    def _watched(
        self,
        driver: VerlDriver,
        workers: _Workers,
        update: Update,
        metrics: dict[str, Any],
        stage: str = "",
        **given: Any,
    ) -> Any:
        """An update that is looked into, with the events written."""
        trainer, batch = update.trainer, update.batch
        view = view_of(batch, is_critics=driver.model == "critic")
        dp_size = max(getattr(trainer, workers.group)._dispatch_info[workers.mesh]) + 1
        mask, stage = view.tensors["response_mask"], given.get("stage") or ""
        policy = driver.before_batch(mask, trainer.global_steps, dp_size, stage)
        put(batch, {ROW_KEY: torch.arange(len(batch.keys)).unsqueeze(-1)})
        reports = self._run(workers, update, metrics, replace(policy, **given))
        ours = reduce_metrics(driver.after_update(reports, view))
        self._of_updates.setdefault(driver.model, []).append(ours)
        metrics.update(ours)
        return batch

    def _run(self, workers: _Workers, update: Update, metrics: dict[str, Any], policy: Policy) -> list[RankReport]:
        """An update through verl's own method, with a policy; what all processes have to say of it."""
        group, extra_info = self._watch(update.trainer, workers), update.batch.extra_info
        extra_info[POLICY_KEY] = policy
        try:
            update.run(metrics)
        finally:
            extra_info.pop(POLICY_KEY, None)
        reports = reports_of(group, workers.ask)
        if workers is _ACTOR and self.stabilizers is not None:
            self.stabilizers.after_update(reports[0].learned)
            names = reports[0].metrics
            ours = {name: [value for report in reports for value in report.metrics[name]] for name in names}
            metrics.update(reduce_metrics(ours))
        return reports

    def _watch(self, trainer: Any, workers: _Workers) -> Any:
        """A model's worker group, whose engines are ours from the first time on."""
        group = getattr(trainer, workers.group)
        if workers.group not in self._watched_groups:
            group.execute_with_func_generator(workers.watch)
            self._watched_groups.add(workers.group)
        return group

    def after_metrics(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Once verl has computed the step's metrics, before they are logged."""
        for updates in self._of_updates.values():
            if len(updates) > 1:  # of which verl has taken means
                metrics.update(joined(updates))
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
