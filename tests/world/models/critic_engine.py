# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's own worker and trainer around a tiny critic; runs inside a rank of :mod:`tests.world`."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lab.experiments.cpu.critic  # noqa: F401
from tests.adapters.verl09 import harness
from verl.workers.utils import losses

__all__ = ["losses", "update"]

FSDP = "critic.fsdp"
BASE = [
    f"{FSDP}.dtype=float32",
    f"+{FSDP}.mixed_precision={harness.FP32}",
    f"{FSDP}.use_torch_compile=false",
    "+critic.model.load_tokenizer=false",
]


@dataclass
class Trainer(harness.Trainer):
    """One rank's critic, and the trainer that every rank runs alike."""

    engine = property(lambda self: self.worker.engine)

    def update(self, batch: Any) -> dict[str, Any]:
        self.trainer.global_steps += 1
        metrics: dict[str, Any] = {}
        with self.store:
            self.trainer._update_critic(self.store.add(batch), metrics)
        return metrics

    def train_mini_batch(self, meta: Any) -> Any:
        """Answer as the worker group does: with a future."""
        self.worker.update_actor = self.worker.train_mini_batch
        output = self.update_actor(meta)
        return SimpleNamespace(futures=[], get=lambda: output)


def update(overrides: list[str], folder: str, batch: Any) -> dict[str, Any]:
    """One update, with ours on where the overrides say so."""
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    config = harness.make_config(["+gradloc=on", *BASE, f"critic.model.path={folder}", *overrides], folder)
    harness.own_folder(config)
    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.max_token_len_per_gpu = 40  # the trainer, too, sets it after the config: two rows
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.global_steps = 0
    trainer.gradloc.build_drivers(trainer.config, harness.Decoder(), ["0.9"])
    made = Trainer(worker, trainer, dp_size=worker.engine.get_data_parallel_size())
    trainer.critic_wg = SimpleNamespace(
        train_mini_batch=made.train_mini_batch,
        execute_with_func_generator=made.ask,
        _dispatch_info={"train": list(range(made.dp_size))},
    )
    metrics = made.update(batch)
    return {
        "weights": made.weights_hash(),
        "metrics": metrics,
    }
