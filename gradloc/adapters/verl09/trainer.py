# SPDX-License-Identifier: Apache-2.0
"""verl's V1 trainers with the driver's side of GradLoc: policies sent with a batch, the ranks' reports asked for."""

import os
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf

from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import response_to_nested

from ...config import fix_dump_dir, settings_in
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.batch import BatchView
from ...loop.metrics import joined
from ...loop.wire import Policy
from ...names import refuse_unknown_names
from ...stabilize.memory import build_memory
from ..verl_common.trainer import TrainerParts, Update, Workers, build_monitor, reweighting_of
from .analysis.trainer import build_analysis
from .batch import fetch, put, view_of
from .config import check_critic, check_features
from .engine import report_of_actor, report_of_model, watch_actor, watch_critic
from .touches import check_verl

_ACTOR = Workers("actor_rollout_wg", "actor", report_of_actor, watch_actor)
_CRITIC = Workers("critic_wg", "train", report_of_model, watch_critic)


class KVUpdate(Update):
    """An update on verl's ``KVBatchMeta``; verl's own method adds to the metrics that it is given."""

    dp_size = property(lambda self: max(self.group._dispatch_info[self.workers.mesh]) + 1)

    def get(self, *names: str) -> list[torch.Tensor]:
        rows = fetch(self.batch, names).to_padded_tensor()
        return [rows[name] for name in names]

    def put(self, **tensors: torch.Tensor) -> None:
        rows = fetch(self.batch, ["response_mask"])["response_mask"]
        put(self.batch, {name: response_to_nested(values, rows) for name, values in tensors.items()})

    def view(self) -> BatchView:
        is_critics = self.workers is _CRITIC
        is_distilled = bool(OmegaConf.select(self.trainer.config, "distillation.enabled"))
        return view_of(self.batch, is_critics, is_distilled and not is_critics)

    def watch(self) -> None:
        """Have the engines of the model's workers be ours, from the first time on."""
        if not hasattr(self.group, "gradloc_is_there"):
            self.group.execute_with_func_generator(self.workers.watch)
            self.group.gradloc_is_there = True

    def run(self, policy: Policy) -> dict[str, Any]:
        self.watch()
        if policy.kind != "off":
            put(self.batch, {ROW_KEY: torch.arange(len(self.batch)).unsqueeze(-1)})
        metrics: dict[str, Any] = {}
        self.batch.extra_info[POLICY_KEY] = policy
        try:
            self.of_verl(metrics)
        finally:
            self.batch.extra_info.pop(POLICY_KEY, None)
        return metrics


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
        settings = settings_in(config, omega_conf_to_dataclass)
        alpha, lopti = reweighting_of(config)
        analysis = build_analysis(config, settings)
        if check_features(config, settings, alpha, lopti, analysis):
            check_verl("trainer")
        fix_dump_dir(config, settings.root)
        if settings.critic != "off":
            check_critic(config)
        clip = OmegaConf.select(config.actor_rollout_ref.actor, "optim.clip_grad")
        memory = build_memory(settings.stabilize, "actor_rollout_ref.actor.optim.clip_grad", clip)
        super().__init__(settings, alpha, lopti, memory, build_monitor(config, clip), analysis)

    def begin(self, tokenizer: Any) -> None:
        """Once the tokenizer is there, before the workers are."""
        self.build_drivers(self.config, tokenizer)
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
        """Right after the estimator."""
        self.reweight(KVUpdate(None, _ACTOR, batch), metrics)

    def update(self, update: KVUpdate, metrics: dict[str, Any]) -> Any:
        """The actor's update; before it, what is analysed."""
        if self.analysis is not None:
            update.watch()
            if self.analysis.run(update.trainer, update.batch, metrics):
                raise _Ended(metrics)
        if not self.is_in_update:
            return update.of_verl(metrics)
        _add(self.update_actor(update), metrics)
        return update.batch

    def after_metrics(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Once verl has computed the step's metrics, before they are logged."""
        for driver in self.drivers:
            if len(driver.of_step) > 1:  # of which verl has taken means
                metrics.update(joined(driver.of_step))
        self.judge(view_of(batch), metrics, global_step)


def _add(of_update: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Add an update's metrics to the step's, lists as verl reduces them."""
    lists = {name: value for name, value in of_update.items() if isinstance(value, list)}
    metrics.update(of_update)
    metrics.update(reduce_metrics(lists))


class _Ended(Exception):
    """The run is to end here (``exit_after_gradient_analysis``), with these metrics of the step."""


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
            self.logger.log(data=ended.args[0], step=self.global_steps)
            self._shutdown_dump_executor()

    def _balance_batch(self, batch: Any, metrics: dict, *args: Any, **given: Any) -> Any:
        return super()._balance_batch(self.gradloc.filter(batch, metrics), metrics, *args, **given)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        self.gradloc.after_advantages(batch, metrics)
        return batch

    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        update = KVUpdate(self, _CRITIC, batch, partial(super()._update_critic, batch))
        if self.gradloc.critic is None:
            return update.of_verl(metrics)
        _add(self.gradloc.update_critic(update), metrics)
        return batch

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        return self.gradloc.update(KVUpdate(self, _ACTOR, batch, partial(super()._update_actor, batch)), metrics)

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
