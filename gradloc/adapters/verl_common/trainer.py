# SPDX-License-Identifier: Apache-2.0
"""What a trainer of verl's holds of GradLoc on the driver, whatever its version calls when."""

import os
from typing import Any

from verl.utils.config import omega_conf_to_dataclass

from ...health.config import HealthConfig
from ...health.monitor import Monitor
from ...loop.batch import BatchView
from ...record.state import load_states, save_states
from ...reweighting import Lopti
from ...stabilize.memory import StabilizerMemory
from .driver import VerlDriver, build_driver

_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""verl's advantage estimators that do not compare a prompt's rollouts: equal rewards still teach them something."""


def reweighting_of(config: Any) -> tuple[float, Lopti | None]:
    """Advantage Reweighting's alpha, and Lopti; a config without the blocks has them off."""
    blocks = [config.algorithm.get(name) for name in ("advantage_reweighting", "lopti")]
    alpha, lopti = (None if block is None else omega_conf_to_dataclass(block) for block in blocks)
    is_on = lopti is not None and lopti.enable
    return (0.0 if alpha is None else alpha.alpha), (Lopti(lopti) if is_on else None)


def build_monitor(config: Any, grad_clip: Any) -> Monitor | None:
    """The trainer's health monitor, or None while ``trainer.health.enable`` is off.

    Args:
        config: the trainer's whole config; one without the block has it off.
        grad_clip: verl's limit on the norm of the actor's gradient.

    Raises:
        ValueError: one sentence for a setting that is wrong, also while it is off.
    """
    block = config.trainer.get("health")
    if block is None:
        return None
    from omegaconf import OmegaConf

    settings: Any = HealthConfig(**OmegaConf.to_container(block, resolve=True))
    if not settings.enable:
        return None
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    return Monitor(settings, limit_of_all(config, grad_clip), estimator not in _WITHOUT_GROUPS)


def limit_of_all(config: Any, grad_clip: Any) -> float | None:
    """verl's limit on the norm of all layers; None without one, and where each layer has a limit of its own."""
    gradloc = config.actor_rollout_ref.actor.get("gradloc") or {}
    stabilize = {} if gradloc.get("enable") is False else gradloc.get("stabilize") or {}
    clips_layers = (stabilize.get("layer_clip") or {}).get("rule") not in (None, False, "off")
    return None if clips_layers or not grad_clip else float(grad_clip)


class TrainerParts:
    """The parts that are on; their states lie in one file beside each checkpoint."""

    spikes: VerlDriver | None = None
    """Of the actor's spikes."""
    critic: VerlDriver | None = None
    """Of the critic's."""

    def __init__(
        self,
        alpha: float = 0.0,
        lopti: Lopti | None = None,
        stabilizers: StabilizerMemory | None = None,
        monitor: Monitor | None = None,
        analysis: Any = None,
    ):
        self.alpha, self.lopti = alpha, lopti  # 0 and None: off
        self.stabilizers, self.monitor, self.analysis = stabilizers, monitor, analysis
        self._checkpoint: str | None = None

    def build_drivers(self, config: Any, settings: Any, tokenizer: Any) -> None:
        """Of the models whose spikes are looked for; see :func:`~.driver.build_driver`."""
        if settings.enable:
            self.spikes = build_driver(config, settings, tokenizer)
        if settings.critic != "off":
            self.critic = build_driver(config, settings, tokenizer, "critic")

    @property
    def drivers(self) -> list[VerlDriver]:
        """Of the models whose spikes are looked for."""
        return [driver for driver in (self.spikes, self.critic) if driver is not None]

    def begin_fit(self, tracking: Any) -> None:
        """Once verl's ``Tracking`` is open, before the first step: whom to tell events, and to show tables."""
        for driver in self.drivers:
            driver.teller.trackers = tracking.logger
        if self.analysis is not None:
            self.analysis.trackers.update(tracking.logger)

    def judge(self, batch: BatchView, metrics: dict[str, Any], global_step: int) -> None:
        """Judge the step's health just before its metrics are logged."""
        if self.monitor is not None:
            self.monitor.observe(batch, metrics, global_step)
            if self._checkpoint is not None:  # written before the step had its metrics
                self.save(self._checkpoint)
        self._checkpoint = None

    def save(self, folder: str) -> None:
        """Put the parts' states beside a checkpoint."""
        if save_states(self._stateful, folder):
            self._checkpoint = folder
            self._remember(folder)

    def load(self, folder: str) -> None:
        """Take the states back from a checkpoint; a part that it does not hold starts anew."""
        self._remember(folder)
        load_states(self._stateful, folder)

    @property
    def _stateful(self) -> dict[str, Any]:
        """The parts that remember something, by their name in the state file."""
        parts = {"spikes": self.spikes, "critic": self.critic, "stabilizers": self.stabilizers, "health": self.monitor}
        return {name: part for name, part in parts.items() if part is not None}

    def _remember(self, folder: str) -> None:
        for driver in self.drivers:
            driver.writer.last_checkpoint = os.path.abspath(folder)
