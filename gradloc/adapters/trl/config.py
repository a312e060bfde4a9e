# SPDX-License-Identifier: Apache-2.0
"""``gradloc=`` and ``health=`` as a user of TRL gives them, and the runs that are refused."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ...checks import require
from ...config import ActionConfig, GradLocConfig
from ...core.actions import ACTIONS
from ...health.config import HealthConfig
from ...stabilize.config import StabilizeConfig

_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
"""accelerate's names of what was tried."""


def settings_of(given: Any, output_dir: str) -> GradLocConfig | None:
    """The settings that hold; None: off.

    Args:
        given: an action's mode or ``off``; settings by name, as YAML or a JSON string have them; or a GradLocConfig.
        output_dir: the run's folder; events go to ``gradloc`` in it, unless ``dump_dir`` says otherwise.

    Raises:
        ValueError: one sentence, for a wrong name or value, and for what TRL's trainers do not have.
    """
    given = _parsed(given)
    if given in ("off", False, None):  # YAML reads a bare off as false
        return None
    if isinstance(given, str):
        require(given in ACTIONS, "gradloc", f"off, {', '.join(ACTIONS)}, or settings by name", given)
        settings = GradLocConfig(action=ActionConfig(mode=given))
    else:
        settings = given if isinstance(given, GradLocConfig) else _named_ours(_filled, GradLocConfig, given)
    if settings.enable is False:
        return None
    require(settings.critic == "off", "gradloc.critic", "off with TRL, whose trainers have none", settings.critic)
    why = "left as it is: the stabilizers need verl"
    require(settings.stabilize == StabilizeConfig(), "gradloc.stabilize", why, settings.stabilize)
    is_named = settings.dump_dir != GradLocConfig.dump_dir
    root = settings.root if is_named else os.path.abspath(os.path.join(output_dir, "gradloc"))
    return replace(settings, enable=True, dump_dir=root)


def health_of(given: Any) -> HealthConfig | None:
    """The health monitor's settings; None: off.

    Args:
        given: True or False; or settings by name, as YAML or a JSON string have them.

    Raises:
        ValueError: one sentence.
    """
    given = _parsed(given)
    if isinstance(given, Mapping):
        given = HealthConfig(**{"enable": True, **given})
    elif not isinstance(given, HealthConfig):
        require(given in (True, False, None), "health", "true, false, or settings by name", given)
        given = HealthConfig(enable=bool(given))
    return given if given.enable else None


def refuse(trainer: Any, settings: GradLocConfig | None) -> None:
    """Refuse a run that no search could look into, or whose weights could not be kept as asked for.

    Raises:
        ValueError: one sentence that names the setting, what was found and what to do.
    """
    args, accelerator = trainer.args, trainer.accelerator
    optimizer = str(getattr(args.optim, "value", args.optim))
    config = getattr(trainer.model.config, "distributed_config", None)
    views = getattr(accelerator.ddp_handler, "gradient_as_bucket_view", False)
    kind = accelerator.distributed_type.name
    keeps = "off" if settings is None else settings.evidence.checkpoint
    needs = (
        (kind in _KINDS, "accelerate's distributed type", "one process, DDP or FSDP2 (other engines step by themselves "
         "or keep gradients elsewhere than in .grad)", kind),
        (kind != "FSDP" or accelerator.is_fsdp2, "fsdp_version", "2 (FSDP1 was not tried with TRL)", 1),
        (not optimizer.startswith(("lomo", "adalomo")) and "layerwise" not in optimizer, "optim",
         "an optimizer that steps once, after the backward", optimizer),
        (trainer.get_tp_size() == 1, "tensor parallelism", "1 (it was not tried)", trainer.get_tp_size()),
        (config is None or config.dp_replicate_size == 1, "distributed_config.dp_replicate_size",
         "1 (hybrid sharding was not tried)", getattr(config, "dp_replicate_size", 1)),
        (config is None or keeps == "off", "gradloc.evidence.checkpoint",
         "off where the model is sharded as it is loaded", keeps),
        (not args.torch_compile, "torch_compile", "false (compiled models were not tried)", args.torch_compile),
        (not trainer._is_vlm, "model", "a model of text (pictures were not tried)", "one of pictures and text"),
        (not views, "gradient_as_bucket_view", "false (a probe would overwrite the gradient that is set aside)", views),
    )  # fmt: skip
    for is_met, key, expected, value in needs:
        require(is_met, key, f'{expected} with gradloc; gradloc="off" trains without', value)


def _named_ours(make: Any, *given: Any) -> Any:
    """Settings say their names as verl has them: here a refusal leaves out what only verl has before them."""
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(str(error).replace("actor_rollout_ref.actor.", "")) from None


def _parsed(given: Any) -> Any:
    """From the command line settings come as JSON."""
    is_json = isinstance(given, str) and given.lstrip().startswith("{")
    return json.loads(given) if is_json else given


def _filled(settings: Any, given: Any) -> Any:
    """A dataclass of settings from nested mappings."""
    require(isinstance(given, Mapping), "gradloc", "a mode or settings by name", given)
    blocks = {field.name: field.default_factory for field in fields(settings) if is_dataclass(field.default_factory)}
    filled = {name: _filled(blocks[name], value) if name in blocks else value for name, value in given.items()}
    return settings(**filled)
