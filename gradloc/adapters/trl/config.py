# SPDX-License-Identifier: Apache-2.0
"""``gradloc=`` and ``health=`` as a user of TRL gives them, and the runs that are refused.

``touched.json`` lists what is private or may change of TRL and what is under it: each function's parameters, or null
where it only has to be there.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...checks import require
from ...config import GradLocConfig, settings_without_verl
from ...health.config import HealthConfig
from ...record import ACTIONS
from ...touched import differences

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
        given = {"action": {"mode": given}}
    return settings_without_verl(given, os.path.join(output_dir, "gradloc"), "TRL, whose trainers have none")


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


@dataclass(frozen=True)
class Setup:
    """What of a run decides whether a search can look into it; the defaults are what can."""

    kind: str = "NO"
    """accelerate's distributed type."""
    is_fsdp1: bool = False
    optim: str = "adamw_torch"
    tensor: int = 1
    replicas: int = 1
    is_sharded_as_loaded: bool = False
    torch_compile: bool = False
    has_pictures: bool = False
    has_views: bool = False
    """DDP's ``gradient_as_bucket_view``."""


def setup_of(trainer: Any) -> Setup:
    """Of a trainer that is built."""
    args, accelerator = trainer.args, trainer.accelerator
    config, kind = getattr(trainer.model.config, "distributed_config", None), accelerator.distributed_type.name
    return Setup(
        kind,
        kind == "FSDP" and not accelerator.is_fsdp2,
        str(getattr(args.optim, "value", args.optim)),
        trainer.get_tp_size(),
        1 if config is None else config.dp_replicate_size,
        config is not None,
        args.torch_compile,
        trainer._is_vlm,
        getattr(accelerator.ddp_handler, "gradient_as_bucket_view", False),
    )


def refuse(run: Setup, settings: GradLocConfig | None) -> None:
    """Refuse a run that no search could look into, or whose weights could not be kept as asked for.

    Raises:
        ValueError: one sentence that names the setting, what was found and what to do.
    """
    keeps = "off" if settings is None else settings.evidence.checkpoint
    needs = (
        (run.kind in _KINDS, "accelerate's distributed type", "one process, DDP or FSDP2 (other engines step by "
         "themselves or keep gradients elsewhere than in .grad)", run.kind),
        (not run.is_fsdp1, "fsdp_version", "2 (FSDP1 was not tried with TRL)", 1),
        (not run.optim.startswith(("lomo", "adalomo")) and "layerwise" not in run.optim, "optim",
         "an optimizer that steps once, after the backward", run.optim),
        (run.tensor == 1, "tensor parallelism", "1 (it was not tried)", run.tensor),
        (run.replicas == 1, "distributed_config.dp_replicate_size", "1 (hybrid sharding was not tried)", run.replicas),
        (not run.is_sharded_as_loaded or keeps == "off", "gradloc.evidence.checkpoint",
         "off where the model is sharded as it is loaded", keeps),
        (not run.torch_compile, "torch_compile", "false (compiled models were not tried)", run.torch_compile),
        (not run.has_pictures, "model", "a model of text (pictures were not tried)", "one of pictures and text"),
        (not run.has_views, "gradient_as_bucket_view", "false (a probe would overwrite the gradient that is set aside)",
         run.has_views),
    )  # fmt: skip
    for is_met, key, expected, value in needs:
        require(is_met, key, f'{expected} with gradloc; gradloc="off" trains without', value)


def _parsed(given: Any) -> Any:
    """From the command line settings come as JSON."""
    is_json = isinstance(given, str) and given.lstrip().startswith("{")
    return json.loads(given) if is_json else given


KNOWN, TRANSFORMERS = ("1.16.0",), "5.23.0"
"""The releases that were tested; TRL itself asks for less of transformers."""
TOUCHED = json.loads(Path(__file__).with_name("touched.json").read_text(encoding="utf-8"))["trainer"]


def check_trl() -> None:
    """Refuse a TRL that this adapter does not fit.

    Raises:
        RuntimeError: one sentence that names the version, what changed, and what to do.
    """
    if changed := differences(TOUCHED):
        raise RuntimeError(
            f"TRL {version('trl')} on transformers {version('transformers')} is not what gradloc hangs on (it knows "
            f"{', '.join(KNOWN)} on {TRANSFORMERS}): {changed[0]}; pip install trl=={KNOWN[-1]} "
            f'transformers=={TRANSFORMERS}, or train with gradloc="off".'
        )
