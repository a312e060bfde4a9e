# SPDX-License-Identifier: Apache-2.0
"""What made a run: versions, model, commit, a digest of the settings. Standard library only."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from .spike import Run

_DIGITS = 12
_GIT_S = 5.0


def origin(
    project: str | None,
    experiment: str | None,
    *,
    settings: Mapping[str, Any],
    model: str | None,
    trainer: str = "verl",
    estimator: str | None = None,
    rollouts: int | None = None,
) -> Run:
    """Which run this is, as its events say it.

    Args:
        project: the trainer's name of it.
        experiment: the same.
        settings: all of the trainer's; only their digest is kept.
        model: path or name of what is trained.
        trainer: the trainer's package.
        estimator: see :class:`~.spike.Run`, as ``rollouts``.
    """
    version = _version(trainer)
    text = json.dumps(settings, sort_keys=True, default=str)
    return Run(
        project=project,
        experiment=experiment,
        trainer=f"{trainer} {version}" if version else None,
        torch=_version("torch"),
        gradloc=__version__,
        model=model,
        commit=_commit(Path.cwd()),
        config=hashlib.sha256(text.encode()).hexdigest()[:_DIGITS],
        estimator=estimator,
        rollouts=rollouts,
    )


def now() -> str:
    """The time, UTC, to the second: ``2026-08-12T03:14:15Z``."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(package: str) -> str | None:
    """Of what is imported, which may be a checkout that is not installed; else of what is."""
    said = getattr(sys.modules.get(package), "__version__", None)
    if said is not None:
        return str(said)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", f"--abbrev={_DIGITS}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
