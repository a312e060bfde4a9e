# Copyright 2025 Individual Contributor: the GradLoc for verl authors
# SPDX-License-Identifier: Apache-2.0
"""The one door to GradLoc: its package is imported once something of it is switched on, and not before."""

import sys
from importlib.util import find_spec

from omegaconf import OmegaConf

VERSION = "0.5.0"  # of the package that this patch was made for
_SWITCHES = ["trainer.health.enable", "trainer.gradient_analysis_mode", "trainer.quartile_analysis_mode"]
_SWITCHES += ["algorithm.advantage_reweighting.alpha", "algorithm.lopti.enable"]
_SWITCHES += ["actor_rollout_ref.actor." + name for name in ("spike_detection", "gradloc.enable", "gradloc.critic")]
_STABILIZERS = ("token_clip.mode", "seq_clip.mode", "layer_clip.rule", "skip_step.enable")
_SWITCHES += ["actor_rollout_ref.actor.gradloc.stabilize." + name for name in _STABILIZERS]
_FILTER = ["actor_rollout_ref.rollout.rollout_filter_" + name for name in ("value", "include_zero")]
# In the names of all settings that the package declares; verl's own files declare the published ones.
_OURS = ("gradloc", "trainer.health", "_analysis", "rollout_filter", "filter_loss", "reweighting", ".lopti")


def require(what, error=ModuleNotFoundError):
    """Raises ``error``, with one sentence, unless the package that ``what`` needs is installed."""
    found = find_spec("gradloc") and getattr(__import__("gradloc"), "__version__", "another package of that name")
    if found != VERSION:
        raise error(
            f"{what} needs the package gradloc {VERSION}, and {sys.prefix} has {found or 'none'}: in a clone of "
            f"GradLoc {VERSION} run `pip install .` on every node, in the environment that trains, or leave that out."
        )


def switched_on(config):
    """The first of our switches that is on in the trainer's whole config, or None."""
    on = [key for key in _SWITCHES if OmegaConf.select(config, key) not in (None, False, "off")]
    on += [key for key in _FILTER if OmegaConf.select(config, key) not in (None, True)]  # 1.0 equals True
    return next(iter(on), None)


def check_overrides():
    """Before Hydra reads the command line: ends the program where the package is missing or a name is mistyped."""
    keys = [argument.partition("=")[0] for argument in sys.argv[1:]]
    ours = [key for key in keys if any(name in key for name in _OURS)]
    if ours:
        require(ours[0], SystemExit)
    if ours or (any(key.startswith("+") for key in keys) and find_spec("gradloc")):
        from gradloc.names import refuse_unknown_overrides

        refuse_unknown_overrides()


def check_config(config):
    """Before Ray is started: ends the program where something is on and the package is missing."""
    if key := switched_on(config):
        require(key, SystemExit)


def build_trainer_hook(trainer):
    """What ``RayPPOTrainer`` calls. While something is on, it also settles in the config what the workers get."""
    key = switched_on(trainer.config)
    if key is None:
        return Off()
    require(key)
    from gradloc.adapters.verl07.trainer import build_trainer_hook

    return build_trainer_hook(trainer)


def settings(**given):
    """What ``actor.gradloc`` becomes on a worker, once the trainer's hook has named this as its target."""
    require("actor_rollout_ref.actor.gradloc")
    from gradloc.config import settings_from

    return settings_from(given)


def build_hook(actor):
    """What ``DataParallelPPOActor`` calls; nothing is done for a reference policy."""
    if actor.actor_optimizer is None:
        return Off(actor)
    if type(getattr(actor.config, "gradloc", None)).__name__ != "GradLocConfig":
        if getattr(actor.config, "spike_detection", None):
            print(
                "gradloc: spike_detection is on, but no spike will be looked into: this trainer has not called "
                "verl.utils.gradloc_seam.build_trainer_hook(self), as RayPPOTrainer.__init__ does.",
                file=sys.stderr,
            )
        return Off(actor)
    from gradloc.adapters.verl07.hook import build_hook

    return build_hook(actor)


class Off:
    """What is called while all is off: verl does what it always did."""

    is_stage = False

    def __init__(self, actor=None):
        self._actor = actor

    def __getattr__(self, name):
        return lambda *given: None

    def before_step(self):
        return self._actor._clip_grad_norm()

    def begin_update(self, data):
        return []

    def token_weights(self, model_inputs, log_prob, given, metrics):
        return given

    def in_stage(self, values, model_inputs):
        return values

    def filter(self, trainer, batch, rewards, extras, metrics):
        return batch, rewards, extras
