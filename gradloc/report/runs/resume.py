# SPDX-License-Identifier: Apache-2.0
"""Where a run is to be resumed: at a checkpoint that is surely its own, in the words of its trainer."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ...words.advice import is_trl
from ..logs.formats import LOGLIKE
from ..logs.segments import LoggedRun

ON = "+gradloc=observe"
"""Switches GradLoc on in verl."""
_CHECKPOINT = re.compile(r"(?:global_step_|checkpoint-)(\d+)")
_SLACK = 120.0
"""Seconds that a checkpoint may be newer than the log's last line."""


def turn_on(run: LoggedRun) -> str:
    """What switches GradLoc on in the run's trainer; empty for a trainer that has no line for it."""
    if is_trl(run.trainer):
        return 'from gradloc.trl import GRPOTrainer; GRPOTrainer(..., gradloc="observe")'
    return ON if run.trainer.startswith("verl") else ""


def resume(run: LoggedRun, before: int, condition: str = "") -> tuple[str, str]:
    """Where to resume from, and the line that does it.

    Args:
        run: as it was read.
        before: the first step that must not be in the checkpoint.
        condition: what the sentence begins with, such as "If the reward falls, ".

    Returns:
        A sentence; and options or code in the trainer's own words, empty where there are none.
    """
    known = sorted(checkpoints(run))
    earlier = [path for step, path in known if step < before]
    if known and not earlier:
        steps = ", ".join(str(step) for step, _ in known[:3]) + (", ..." if len(known) > 3 else "")
        return (
            f"{condition}No checkpoint here is from before step {before} (there is step {steps}): start anew, or look "
            "for an older one elsewhere."
        ), ""
    where = str(earlier[-1]) if earlier else ""
    verb = f"{condition}resume" if condition else "Resume"
    sentence = f"{verb} from your last checkpoint before step {before}"
    if is_trl(run.trainer):
        return f"{sentence}:", f'trainer.train(resume_from_checkpoint="{where or "OUTPUT_DIR/checkpoint-N"}")'
    if run.trainer.startswith("verl"):
        path = shlex.quote(where) if where else "CHECKPOINTS/global_step_N"
        return f"{sentence}:", f"trainer.resume_mode=resume_path trainer.resume_from_path={path} {ON}"
    return f"{sentence}{f', {where}' if where else ''}.", ""


def checkpoints(run: LoggedRun) -> Iterator[tuple[int, Path]]:
    """The run's own checkpoints, by step: not empty, and not newer than the log."""
    if run.folder is None:
        return
    logs = [run.folder / Path(segment.source).name for segment in run.segments]
    ends = [log.stat().st_mtime for log in logs if log.is_file()]
    seen = set()
    for folder in _folders(run, run.folder):
        for path in folder.glob("*") if folder.is_dir() else ():
            named = _CHECKPOINT.fullmatch(path.name)
            if named is None or path.resolve() in seen or not path.is_dir() or not any(path.iterdir()):
                continue
            seen.add(path.resolve())
            if not ends or path.stat().st_mtime <= max(ends) + _SLACK:
                yield int(named[1]), path


def _folders(run: LoggedRun, own: Path) -> Iterator[Path]:
    """Where the run's checkpoints may lie: where its settings say; else in its log's folder, if no other run's log is
    in there."""
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
    is_own = own.name == experiment if experiment or named else not _others(run, own)
    if is_own:
        yield own
        yield own / "checkpoints"


def _others(run: LoggedRun, own: Path) -> bool:
    """Whether the folder holds logs besides the run's own."""
    known = {Path(segment.source).name.partition(".")[0] for segment in run.segments}
    others = (entry.name for entry in own.iterdir() if entry.is_file() and LOGLIKE.search(entry.name))
    return any(
        name.partition(".")[0] not in known and not (run.format == "TensorBoard" and ".tfevents." in name)
        for name in others
    )
