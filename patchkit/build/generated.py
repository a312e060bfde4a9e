# SPDX-License-Identifier: Apache-2.0
"""Checks verl's generated reference configurations: they must be what the sources compose to.

verl makes ``_generated_*.yaml`` with a script that an installed package lacks, so Hydra's compose call is used.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ..errors import IntegrityError, quoted

CONFIG = "verl/trainer/config"
SPECS = {
    "_generated_ppo_trainer.yaml": ("ppo_trainer", ""),
    "_generated_ppo_megatron_trainer.yaml": ("ppo_megatron_trainer", "--config-name=ppo_megatron_trainer.yaml"),
}
_HEADER = """\
# This reference configration yaml is automatically generated via 'scripts/generate_trainer_config.sh'
# in which it invokes 'python3 scripts/print_cfg.py --cfg job {argument}' to flatten the \
'verl/trainer/config/{name}.yaml' config fields into a single file.
# Do not modify this file directly.
# The file is usually only for reference and never used.

"""
_COMPOSE = """\
import sys
sys.path.remove("")
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
with initialize_config_dir(config_dir=sys.argv[1], version_base=None):
    sys.stdout.write(OmegaConf.to_yaml(compose(config_name=sys.argv[2])))
"""


def can_check() -> bool:
    """True if Hydra can be imported here."""
    return find_spec("hydra") is not None


def generate(root: Path, name: str) -> bytes:
    """Returns what the generated file ``name`` must hold in the tree at ``root``."""
    config, argument = SPECS[name]
    command = [sys.executable, "-c", _COMPOSE, str((root / CONFIG).resolve()), config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [""]
        what, cause = f"verl's configuration {config} does not compose", "An edited yaml is wrong."
        raise IntegrityError("take-config-broken", what, cause, "Repair what the line above names.", found=said[-1])
    # verl keeps what follows this key; the keys before it would only be Hydra's own.
    lines = done.stdout.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("actor_rollout_ref"))
    return (_HEADER.format(argument=argument, name=config) + "".join(lines[first:])).encode()


def stale(root: Path) -> dict[str, bytes]:
    """Returns what the stale generated files in the tree at ``root`` must hold, by path."""
    wanted = {f"{CONFIG}/{name}": generate(root, name) for name in SPECS}
    return {path: data for path, data in wanted.items() if (root / path).read_bytes() != data}


def check(root: Path) -> None:
    """Raises IntegrityError if a generated file in the tree at ``root`` is stale."""
    for path in stale(root):
        what, cause = f"{path} is not what the configuration composes to", "A yaml was edited and it was not."
        next_ = f"bash make_patch.sh --repo {quoted(root)} --refresh-generated"
        raise IntegrityError("take-stale-yaml", what, cause, next_, path=path)
