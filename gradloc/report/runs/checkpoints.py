# SPDX-License-Identifier: Apache-2.0
"""Finds a run's own checkpoints near its log; one that may be another run's is never named."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..logs.formats import LOGLIKE
from ..logs.segments import LoggedRun

_CHECKPOINT = re.compile(r"(?:global_step_|checkpoint-)(\d{1,15})")
_SLACK = 120.0
"""Seconds by which a checkpoint may be newer than the log."""


def checkpoints(run: LoggedRun) -> Iterator[tuple[int, Path]]:
    """Yield the run's own checkpoints as (step, folder).

    Empty ones and those newer than the log are left out; so are all where the log does not give its steps.
    """
    if run.folder is None or run.unit != "step":
        return
    logs = [run.folder / Path(segment.metrics.source).name for segment in run.segments]
    ends = [log.stat().st_mtime for log in logs if log.is_file()]
    seen = set()
    for folder in _folders(run, run.folder):
        with suppress(OSError):  # a name that is too long, somebody else's folder
            for path in folder.glob("*") if folder.is_dir() else ():
                named = _CHECKPOINT.fullmatch(path.name)
                if named is None or path.resolve() in seen or not path.is_dir() or not any(path.iterdir()):
                    continue
                seen.add(path.resolve())
                if not ends or path.stat().st_mtime <= max(ends) + _SLACK:
                    yield int(named[1]), path


def _folders(run: LoggedRun, own: Path) -> Iterator[Path]:
    """Yield folders that may hold the run's checkpoints: those of its settings, else its log's if that log is alone."""
    if _CHECKPOINT.fullmatch(own.name):  # a trainer_state.json in a checkpoint
        yield own.parent
        return
    settings = {name: str(value) for name, value in run.config.items()}
    project, experiment = settings.get("trainer.project_name", ""), settings.get("trainer.experiment_name", "")
    named = settings.get("trainer.default_local_dir") or settings.get("output_dir") or ""
    named = named.replace("${trainer.project_name}", project).replace("${trainer.experiment_name}", experiment)
    if named:
        yield own / named  # an absolute one stays as it is
        yield Path(named)
    if experiment:
        yield own / experiment
        yield own / "checkpoints" / project / experiment
    is_own = own.name == experiment if experiment or named else not _has_other_logs(run, own)
    if is_own:
        yield own
        yield own / "checkpoints"


def _has_other_logs(run: LoggedRun, own: Path) -> bool:
    """Return whether the folder holds logs besides the run's own."""
    known = {Path(segment.metrics.source).name.partition(".")[0] for segment in run.segments}
    others = (entry.name for entry in own.iterdir() if entry.is_file() and LOGLIKE.search(entry.name))
    return any(
        name.partition(".")[0] not in known and not (run.format == "TensorBoard" and ".tfevents." in name)
        for name in others
    )
