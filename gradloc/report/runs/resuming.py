# SPDX-License-Identifier: Apache-2.0
"""Where a run is to be resumed from after an explosion, and whether a resume got past it.

A checkpoint is named only if it is certainly the run's own.
"""

import math
import shlex
from collections import Counter
from collections.abc import Sequence

from ...explain.advice import is_trl
from ...explain.numbers import number
from ...explain.text import listed, plural
from ..logs.segments import LoggedRun, Segment, surviving
from .checkpoints import checkpoints
from .effects import begin_of, deciding_metric
from .health import ranges
from .signals import EARLIER, begins, from_start, interval, loss_of, onset, trainer_class
from .spikes import HARMLESS, Explosion

ON = "+gradloc=observe"
"""Switches GradLoc on in verl."""


def turn_on(run: LoggedRun) -> str:
    """Return the line that switches GradLoc on in the run's trainer; empty where there is none."""
    if is_trl(run.trainer):
        name = trainer_class(run.metrics)
        return f'from gradloc.trl import {name}; {name}(..., gradloc="observe")'
    return ON if run.trainer.startswith("verl") else ""


def is_overwritten(run: LoggedRun, explosion: Explosion) -> bool:
    """Return whether the run was resumed from before it, and logged its step again."""
    return any(explosion.peak.step in lost for segment, lost in run.overwritten if segment is explosion.segment)


def overwritten(run: LoggedRun, told: Explosion | None = None) -> list[str]:
    """Note which steps were logged again after a resume, or never again, with the worst norms that were discarded.

    ``told`` is an explosion that was described already.
    """
    counts = Counter(step for part in run.parts for step in part.steps)
    lost = sorted({step for _, steps in run.overwritten for step in steps})
    again = [step for step in lost if counts[step] > 1]
    worst = dict.fromkeys(filter(None, (_worst_discarded(part, steps[0], told) for part, steps in run.overwritten)))
    more = f"; the largest norm that was discarded is {listed([*worst])}" if worst else ""
    times = f" {len(run.overwritten)} times" if len(run.overwritten) > 1 else ""
    most, least = (pick((counts[step] for step in again), default=0) for pick in (max, min))
    how = "twice" if most == 2 else f"{most} times" if most == least else f"up to {most} times"
    gone = [step for step in lost if counts[step] == 1]
    said = [(again, f"logged {how}"), (gone, "discarded")]
    parts = [
        f"{plural(len(steps), 'step')} ({ranges(steps)}) {'was' if len(steps) == 1 else 'were'} {done}"
        for steps, done in said
        if steps
    ]
    is_resumed = any(len(steps) > 1 for _, steps in run.overwritten)  # one step again may be the end of an epoch
    begin = f"The run was resumed{times}: " if is_resumed else ""
    return [f"{begin}{' and '.join(parts)}{more}."] if parts else []


def _worst_discarded(segment: Segment, first: int, told: Explosion | None) -> str:
    """Return the largest norm of a segment from a step on, with its step; empty where ``told`` is about it."""
    metrics = segment.metrics
    norms = [(norm, step) for step, norm in metrics.logged(metrics.norm or "") if step >= first]
    if not norms:
        return ""
    peak, step = max(norms, key=lambda norm: (not math.isfinite(norm[0]), norm[0]))
    is_told = told is not None and any(each.step == step for each in told.steps)
    return "" if is_told else f"{number(peak, 3)} at step {step}"


def is_left_behind(run: LoggedRun, explosions: Sequence[Explosion]) -> bool:
    """Return whether a resume from before the explosions got past the worst of them, the first, without another."""
    worst = explosions[0]
    is_past = all(each.segment is not run.segments[-1] for each in explosions)
    return is_past and run.metrics.steps[-1] > worst.peak.step and is_overwritten(run, worst)


def count_again(explosions: Sequence[Explosion]) -> int:
    """Return in how many parts of the log the run came to the worst explosion, the first, at the same step."""
    return len({id(each.segment) for each in explosions if each.first == explosions[0].first})


def advise(run: LoggedRun, explosions: Sequence[Explosion], is_hurt: bool | None, is_sound: bool) -> tuple[str, str]:
    """Say whether and where to go back because of the worst explosion, the first, and return the options that do it."""
    worst = explosions[0]
    is_first = bool(worst.lost) and worst.first == run.segments[0].first
    begin = begins(run) if is_first else "start"
    earlier = " The fault began before this log." if is_first and begin == "late" else ""
    if earlier and worst.kind in ("lost", "end") and not is_sound:
        return EARLIER, ""
    if is_sound and worst.kind == "lost":
        return (
            "No need to go back, because these steps were most likely skipped, as fp16's scaler does."
            f"{earlier} Nothing is learned while every step is skipped. Train in bf16 with the weights in fp32, or log "
            "each layer's norm to find the layer whose norm is not finite."
        ), ""
    if is_sound and len(worst.lost) == len(worst.steps):
        return (
            "No need to go back, because the step was skipped, as fp16's loss scaler does. "
            "Look again if many skips follow.",
            "",
        )
    peak, on = worst.peak.step, turn_on(run)
    end = ", with GradLoc on for the next spike:" if on else "."
    if is_left_behind(run, explosions):
        return f"The resumed run got past step {peak}: continue{end}", on
    if worst.kind in HARMLESS:
        return f"No need to resume. Continue the run{end}", on
    if is_hurt is False and worst.kind != "growth":
        deciding = deciding_metric(run.metrics)
        worse = "higher" if deciding == "loss" else "lower"
        return f"No need to resume: the {deciding} is no {worse} than before the spike. Continue the run{end}", on
    if is_first and begin != "late" and worst.kind in ("lost", "end"):
        return (
            f"{from_start('The norm', begin)} a restart with the same settings will fail as this one did. Look at the "
            "precision, the learning rate, and the first batch's data and labels."
        ), ""
    is_certain = is_hurt or worst.kind == "lost" or (worst.kind == "growth" and is_hurt is None)
    deciding = deciding_metric(run.metrics)
    verb = "rises" if deciding == "loss" else "falls"
    logged = [step for step, _ in surviving(worst.segment).logged(worst.segment.metrics.norm or "")]
    losses = loss_of(surviving(worst.segment))[1]
    first = onset(losses, begin_of(worst, explosions)) if is_hurt else worst.first
    last = max((step for step in logged if step < first), default=first - 1)
    before = last + 1 if interval(run.metrics) > 1 else first
    condition = "" if is_certain else f"If the {deciding} {verb}, "
    if worst.segment is run.segments[-1] and worst.segment.before is not None and count_again(explosions) > 1:
        tried = min(each.segment.first for each in explosions if each.segment.before is not None)
        sentence, command = resume_before(run, tried - 1, "go further back: ")
        change = f"skip the batches around step {worst.first}, lower the learning rate, or {sentence}"
        return f"Change something before the next resume: {change}", command
    sentence, command = resume_before(run, before, condition)
    return f"{earlier.strip()} {sentence}".strip(), command


def resume_before(run: LoggedRun, before: int, condition: str) -> tuple[str, str]:
    """Say where to resume from, and return the options or the code that do it, "" where there are none.

    Args:
        run: the run.
        before: the first step that must not be in the checkpoint.
        condition: the sentence's beginning; "" where it has none.
    """
    known = sorted(checkpoints(run))
    earlier = [path for step, path in known if step < before]
    if known and not earlier:
        steps = ", ".join(str(step) for step, _ in known[:3]) + (", ..." if len(known) > 3 else "")
        return (
            f"{condition}{'no' if condition else 'No'} checkpoint here is from before step {before} (there is step "
            f"{steps}): start anew, or look for an older one elsewhere."
        ), ""
    if not known and not run.saved and begins(run) == "start" and before - 1 <= run.segments[0].first:
        return (
            f"{condition}{'start' if condition else 'Start'} anew: no checkpoint is older than the log's first row. "
            "Take a smaller learning rate or a longer warm-up, and look at the first batches and the precision."
        ), ""
    where = str(earlier[-1]) if earlier else ""
    verb = f"{condition}resume" if condition else "Resume"
    sentence = f"{verb} from your last checkpoint before step {before}{run.metrics.place(before)}"
    seen = min((step for segment in run.segments for step in segment.metrics.steps if step >= before), default=before)
    if seen > before:
        unseen = f"step {before} is" if seen - before == 1 else f"steps {before} to {seen - 1} are"
        sentence += f" ({unseen} not logged, and the fault may have begun there)"
    saved = max((step for step in run.saved if step < before), default=None)
    if run.unit not in ("step", "epoch"):
        sentence += ". The log gives no steps, so find it by its epoch" if run.metrics.place(before) else ""
    elif not where and saved is not None:
        where = run.saved[saved]
        sentence += f" (the log says that step {saved:,} was saved)"
    if is_trl(run.trainer):
        return f"{sentence}:", f'trainer.train(resume_from_checkpoint="{where or "OUTPUT_DIR/checkpoint-N"}")'
    if run.trainer.startswith("verl"):
        path = shlex.quote(where) if where else "CHECKPOINTS/global_step_N"
        return f"{sentence}:", f"trainer.resume_mode=resume_path trainer.resume_from_path={path} {ON}"
    return f"{sentence}{f', {where}' if where else ''}.", ""
