# SPDX-License-Identifier: Apache-2.0
"""Find what made a run: versions, commit, a digest of the settings. Imports the standard library only."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from . import Run

_NUM_DIGITS = 12
_GIT_TIMEOUT_S = 5.0


def with_origin(run: Run, settings: Mapping[str, Any], trainer: str = "verl") -> Run:
    """Return the run with versions, commit and a digest of the trainer's settings.

    Args:
        run: what the trainer knows of itself.
        settings: the trainer's; only their digest is kept, and none where they are empty.
        trainer: name of the trainer's package.
    """
    version = version_of(trainer)
    text = json.dumps(settings, sort_keys=True, default=str)
    return replace(
        run,
        trainer=f"{trainer} {version}" if version else None,
        torch=version_of("torch"),
        gradloc=__version__,
        commit=_commit(Path.cwd()),
        config=hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS] if settings else None,
    )


def now() -> str:
    """Return the time, UTC, to the second: ``2026-08-12T03:14:15Z``."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def version_of(package: str) -> str | None:
    """Return the version of the imported package, which may be a checkout; else of the installed one."""
    imported = getattr(sys.modules.get(package), "__version__", None)
    try:
        return metadata.version(package) if imported is None else str(imported)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """Return the commit that a folder has checked out, with ``-dirty`` if files differ from it; None outside of git."""
    describe = ["describe", "--always", "--exclude=*", "--dirty", f"--abbrev={_NUM_DIGITS}"]  # without tags: the commit
    command = ["git", "-C", str(folder), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
