# SPDX-License-Identifier: Apache-2.0
"""Diagnose a run by its log alone: what exploded, what that did to the run, and what to do now.

A checkpoint to resume from is named only if it is certainly the run's own.
"""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from ...explain.advice import is_trl, sampling_cut
from ...explain.aftermath import Aftermath
from ...explain.numbers import number
from ...explain.text import capitalized, in_unit, listed, plural
from ...health import HealthConfig
from ...health.rules import SCORES
from ..logs.names import is_norm, is_training_loss
from ..logs.recording import Metrics
from ..logs.segments import LoggedRun, surviving
from ..memory import uncollected
from .checkpoints import checkpoints
from .health import LOSSES, TOO_SHORT, ranges
from .signals import (
    ADVERSARIAL,
    BLOWN,
    EARLIER,
    EFFECTS,
    LOSS,
    Sign,
    begins,
    course,
    findings,
    from_start,
    interval,
    is_adversarial,
    loss_of,
    lost_loss,
    minor_skips,
    onset,
    past_its_best,
    sound_loss,
    trainer_class,
)
from .spikes import (
    EARLY,
    HARMLESS,
    KINDS,
    UNRECOVERED,
    Explosion,
    Judged,
    clipped_or_zero,
    explosions_of,
    judge_run,
    missing_norm,
)

_LEVEL = 5
"""Values whose median is a metric's level before an explosion, or after it."""
_MIN_NORMS = 8
"""A run with fewer norms is not judged."""
_WITHIN = 30
"""Values after an explosion among which its effects are looked for."""
_DECIDING = {"reward", "loss"}
"""The metrics that decide whether an explosion did harm."""
_MAX_CURVES = 3
"""Small curves around an explosion, at most."""
_NEAR = 20
"""Values before an explosion that show how much a metric scatters. A curve has as many on either side."""


@dataclass
class Diagnosis:
    """The diagnosis of one run."""

    run: LoggedRun
    headline: str
    kind: str = ""
    """One of :data:`~.spikes.KINDS`; empty where the norms are healthy."""
    explosions: list[Explosion] = field(default_factory=list)
    """Explosions, the worst first."""
    sentences: list[str] = field(default_factory=list)
    """Sentences about the worst: effects, whether a resume overwrote it, which tokens, where to resume."""
    command: str = ""
    """Options to resume with."""
    limits: list[str] = field(default_factory=list)
    """Sentences about what the rules cannot see, and about overwritten steps."""
    judged: list[list[Judged]] = field(default_factory=list)
    """Judged steps of each segment."""
    is_judged: bool = True
    """Whether the log has enough rows to call the run healthy where nothing is found."""
    is_left_behind: bool = False
    """Whether a resume from before the explosions got past them."""

    @property
    def label(self) -> str:
        """The kind in words; empty where the norms are healthy."""
        until = ", until it was resumed" if self.is_left_behind and self.kind in UNRECOVERED else ""
        is_worsts = self.worst is not None and self.worst.kind == self.kind
        return (self.worst.label if is_worsts else KINDS.get(self.kind, "")) + until

    @property
    def is_unrecovered(self) -> bool:
        """Whether the run ends as it is not to be, though its last step may look healthy next to the ones before."""
        return self.kind in UNRECOVERED and not self.is_left_behind

    @property
    def gravity(self) -> int:
        """How bad the run is: 2 where it does not recover or a metric is not finite, 1 with another fault, else 0."""
        return 2 if self.is_unrecovered or self.kind == "unfinite" else int(self.kind not in ("", *HARMLESS))

    @property
    def advice(self) -> str:
        """The sentence on whether and where to go back; empty where nothing is wrong."""
        return self.sentences[-1] if self.sentences else ""

    @property
    def ground(self) -> str:
        """A sentence on the rows and metrics that the run was judged from."""
        metrics = self.run.metrics
        has_loss = loss_of(metrics)[1] or self.kind == "unfinite"
        effects = [effect for effect in EFFECTS if effect is not LOSS or has_loss]
        names = [*filter(None, [metrics.norm, *(metrics.first(effect.names) for effect in effects)])]
        own = dict.fromkeys(map(metrics.own, names))
        logged = [len(metrics.logged(name)) for name in ([metrics.norm] if metrics.norm else names)]
        count = max(logged, default=len(metrics.steps))
        num_skips = sum(not skip.is_nan_loss and not skip.is_end for skip in self.run.skips)
        skips = [f"{plural(num_skips, 'line')} of skipped steps"] if num_skips else []
        if skips and not own:
            return f"Judged from {skips[0]}."
        if not own:
            return f"No metric of the {plural(count, 'row')} can be judged."
        return f"Judged from {plural(count, 'row')} of {', '.join([*own, *skips])}."

    @property
    def worst(self) -> Explosion | None:
        return self.explosions[0] if self.explosions else None


@uncollected()
def diagnose(run: LoggedRun, settings: Mapping[str, float] | None = None) -> Diagnosis:
    """Diagnose a run.

    Args:
        run: the run, as its log was read.
        settings: the settings of the trigger's rule; None: the defaults.
    """
    made = _diagnose(run, settings)
    made.headline = in_unit(made.headline, run.unit)
    made.sentences = [in_unit(sentence, run.unit) for sentence in made.sentences]
    made.limits = [in_unit(sentence, run.unit) for sentence in made.limits]
    return made


def _diagnose(run: LoggedRun, settings: Mapping[str, float] | None) -> Diagnosis:
    signs = findings(run)
    if all(part.norm is None for part in run.parts):
        return _without_norms(run, signs)
    judged = judge_run(run, settings)
    warmup = int((settings or {}).get("warmup", 16))
    limits = [limit for at, steps in enumerate(judged) for limit in _warmup(steps, warmup, at)]
    limits += [*_unsized(run), *_unseen(run), *minor_skips(run), *filter(None, [sampling_cut(run.config, run.trainer)])]
    explosions = _worst_first(run, judged)
    limits += _overwritten(run, explosions[0] if explosions else None)
    made = Diagnosis(run, "", explosions=explosions, limits=[*dict.fromkeys(limits)], judged=judged)
    kind, masked = clipped_or_zero(judged, [value for _, value in loss_of(run.metrics)[1]])
    if made.explosions:
        made.limits += [masked] if masked else []
        _describe_worst(made, signs)
        return made
    made.kind, made.headline = kind, masked or _without_explosion(judged)
    made.is_judged = bool(kind or signs) or sum(map(len, judged)) >= _MIN_NORMS
    if not kind and not signs and made.is_judged:
        made.headline = f"{made.headline} {_course(run)}".rstrip()
    if signs and kind != "zero":
        made.limits += [masked] if masked else []
        _lead_with(made, signs)
    return made


def _without_norms(run: LoggedRun, signs: list[Sign]) -> Diagnosis:
    """Diagnose a run that logs no gradient norm."""
    missing = missing_norm(run.parts[-1], run.name)
    made = Diagnosis(run, missing, limits=[*_unsized(run), *_unseen(run), *minor_skips(run), *_overwritten(run)])
    counts = (len(run.metrics.known(name)) for effect in EFFECTS for name in effect.names)
    made.is_judged = bool(signs) or max(counts) > HealthConfig().warmup
    if signs:
        made.limits[:0] = [missing] if set(run.parts[-1].series) - {"skipped", "loss scale"} else []
        _lead_with(made, signs)
        return made
    if not any(map(is_norm, run.metrics.own_names)) and (said := _course(run)):
        if not made.is_judged:
            count = plural(len(_main_series(run)[1]), "step")
            said = f"{TOO_SHORT}: {count}. {_odd_of_few(*loss_of(run.metrics)) or said}"
        made.headline = said
        made.limits.insert(0, missing)
    return made


def _course(run: LoggedRun) -> str:
    """Describe a loss in which nothing was found, or a run's reward; empty where it has neither."""
    name, values = _main_series(run)
    if len({value for _, value in values}) < 2:
        in_all = f" in all {plural(len(values), 'row')}" if len(values) > 1 else ""
        return f"{name} is {number(values[0][1], 3)}{in_all}." if values else ""
    (first, begin), (last, end) = values[0], values[-1]
    went = f"{name} went from {number(begin, 3)} at step {first} to {number(end, 3)} at step {last}"
    if not loss_of(run.metrics)[1]:
        return went + (past_its_best([(step, -value) for step, value in values], "highest") or ".")
    if is_adversarial(run.metrics):
        return went + _other_gan_losses(run, name)
    return went + (course(values) if len(values) > HealthConfig().warmup else ".")


def _other_gan_losses(run: LoggedRun, name: str) -> str:
    """Continue a sentence on one of a GAN's losses with the others."""
    others = [own for own in run.metrics.own_names if own != name and ADVERSARIAL.search(own) and is_training_loss(own)]
    known = [(own, run.metrics.known(own)) for own in others[:3]]
    return "".join(f", {own} from {number(of[0][1], 3)} to {number(of[-1][1], 3)}" for own, of in known if of) + "."


def _main_series(run: LoggedRun) -> tuple[str, list[tuple[int, float]]]:
    """Return the name and values of a run's loss, else of its reward."""
    metrics = run.metrics
    reward = metrics.first(SCORES)
    return (metrics.own(reward), metrics.known(reward)) if reward else loss_of(metrics)


def _odd_of_few(name: str, losses: Sequence[tuple[int, float]]) -> str:
    """Say which of a few losses is far above the others; empty where none is, or the first one."""
    if len(losses) < 4 or not all(value > 0 for _, value in losses):
        return ""
    step, top = max(losses, key=lambda loss: loss[1])
    others = max(value for at, value in losses if at != step)
    if step == losses[0][0] or top < 3 * others:
        return ""
    return f"{name} is {number(top, 3)} at step {step}, {number(top / others, 2)} times the largest of the others."


def _worst_first(run: LoggedRun, judged: Sequence[Sequence[Judged]]) -> list[Explosion]:
    """Find the explosions of all segments; those of a run's first steps are the last."""
    pairs = zip(run.segments, judged, strict=True)
    found = [explosion for segment, steps in pairs for explosion in explosions_of(segment, steps)]
    found = [
        replace(each, is_start=False, kind="back") if each.is_start and _effects(each)[1] else each for each in found
    ]
    last, usual = run.segments[-1], median(run.metrics.norms or [1.0]) or 1.0

    def badness(found: Explosion) -> tuple[bool, bool, float, bool]:
        norm = found.peak.norm  # where norms have vanished, a small one is a multiple
        height = found.times * norm / usual if math.isfinite(norm) else math.inf
        return not found.is_start, found.kind == "lost" or len(found.lost) > 2, height, found.segment is last

    return sorted(found, key=badness, reverse=True)


def _describe_worst(made: Diagnosis, signs: list[Sign]) -> None:
    """Add the worst explosion's kind and the sentences on what it did and what to do."""
    run, worst = made.run, made.explosions[0]
    made.headline = worst.sentence
    if worst.is_start:
        made.sentences.append("Norms are often high in a run's first steps and fall by themselves.")
    sound = sound_loss(surviving(worst.segment), worst.lost[0]) if worst.lost else ""
    since = _begin_of(worst, made.explosions)
    effects, is_hurt = _effects(worst, since)
    if since < worst.first and not worst.is_start:
        made.sentences.append(f"The spikes that lead to it begin at step {since}.")
    if sound:
        effects, is_hurt = f"{sound}: the weights are not NaN.", False
    elif worst.lost and is_hurt is None:
        effects = lost_loss(run, worst.lost) or effects
    is_followed = worst.kind == "end" and worst.peak is not worst.steps[-1]
    if is_hurt and (worst.kind in ("back", "level") or is_followed):
        made.explosions[0] = worst = replace(worst, kind="collapse")
    if worst.kind == "level" and is_hurt is False and (learned := _learned(worst)):
        made.explosions[0] = worst = replace(worst, kind="learning")
        effects = learned
    made.kind = worst.kind
    also = [sign.sentence for sign in signs if sign.kind in ("unfinite", "skipped")]
    if worst.kind in ("back", *HARMLESS):  # a jump of the loss elsewhere is another finding
        near = range(worst.first, worst.steps[-1].step + 2)
        also += [sign.sentence for sign in signs if sign.kind == "loss" and sign.first not in near]
    is_short = worst.kind == "back" or len(worst.steps) == 1
    made.sentences += _loss_at(worst) if is_short and not worst.lost else []
    made.sentences += also if worst.lost and is_hurt is None and also else [effects, *also]
    losses = run.metrics.logged(run.metrics.first(LOSSES)) if worst.lost else []
    after = [value for step, value in losses if step >= worst.lost[0]]
    if is_hurt is None and after and not any(map(math.isfinite, after)):
        is_hurt = True
    made.is_left_behind = _is_left_behind(run, made.explosions)
    if _is_overwritten(run, worst) and _count_again(made.explosions) < 2:
        made.sentences.append(
            f"The run was later resumed from before step {worst.peak.step}, so a plot may show the later values only."
        )
    made.sentences += _others(made.explosions)
    advice, made.command = _advise_resume(run, made.explosions, is_hurt, bool(sound))
    made.sentences.append(f"{_on_tokens(run, worst.peak.step, 'GradLoc on' in advice)} {advice}")


def _learned(worst: Explosion) -> str:
    """Say how far the loss fell since an explosion began; empty where it fell by less than a tenth, or rose first."""
    name, losses = loss_of(surviving(worst.segment))
    if _change(losses, worst.first, None, LOSS.rise):
        return ""
    before, after = (
        [loss for step, loss in losses if (step < worst.first) == is_before and math.isfinite(loss)][-_LEVEL:]
        for is_before in (True, False)
    )
    if not len(before) == len(after) == _LEVEL or not 0 < median(after) < 0.9 * median(before):
        return ""
    return (
        f"{capitalized(name)} fell meanwhile, from {number(median(before), 3)} to {number(median(after), 3)} (medians)."
    )


def _loss_at(worst: Explosion) -> list[str]:
    """Name the highest loss of an explosion's own steps, if it is far above the ones before them."""
    name, logged = loss_of(surviving(worst.segment))
    before = [value for at, value in logged if at < worst.first and math.isfinite(value)][-_LEVEL:]
    own = [(value, at) for at, value in logged if worst.first <= at <= worst.steps[-1].step]
    loss, step = max(own, default=(0.0, 0))
    if len(before) < _LEVEL or not loss > 1.5 * max(before) > 0:
        return []
    return [f"{name} is {number(loss, 3)} at step {step}, and was {number(median(before), 3)} before it."]


def _on_tokens(run: LoggedRun, step: int, is_on_advised: bool) -> str:
    """Say where the tokens of a step's spike are named, or why they are not; ``is_on_advised``: other advice says to
    turn GradLoc on.
    """
    metrics = run.metrics
    if not any(name.startswith("gradloc/") for name in metrics.series):
        is_loop = run.trainer == "other"
        turn_on = "add gradloc.Watch(model, optimizer) to the loop" if is_loop else "train with GradLoc on"
        return "A log cannot show which tokens did it" + ("." if is_on_advised else f": {turn_on}.")
    spikes, thresholds = (dict(metrics.logged(f"gradloc/{name}")) for name in ("spikes", "threshold"))
    if spikes.get(step) != 0:
        return "GradLoc wrote which tokens did it: name the folder of its events, which gradloc.dump_dir set."
    why = "its threshold is higher" if step in thresholds else "a run's first steps have no threshold (trigger.warmup)"
    return f"GradLoc was on, and took step {step} for no spike: {why}."


def _lead_with(made: Diagnosis, found: list[Sign]) -> None:
    """Make findings of other metrics than the norm the headline and the sentences of a diagnosis."""
    first, *others = found
    made.kind, made.headline = first.kind, first.sentence
    made.sentences += [finding.sentence for finding in others]
    if not first.advice and first.before is not None:
        before = min(finding.before for finding in found if finding.before is not None)
        sentence, made.command = _resume(made.run, before, "")
        made.sentences.append(sentence)
    else:
        made.sentences.append(first.advice or "A log cannot show why; turn GradLoc on for the next run.")


def _unsized(run: LoggedRun) -> list[str]:
    """Note that a GAN's loss is judged only by whether it is finite."""
    name = loss_of(run.metrics)[0]
    if not is_adversarial(run.metrics):
        return []
    note = f"{name} is a GAN's, so its size shows no fault: only whether it is finite is judged."
    known = run.metrics.known(run.metrics.first(LOSSES))
    step, top = max(known, key=itemgetter(1), default=(0, 0.0))
    usual = median([abs(value) for _, value in known] or [0.0])
    far = f" Its largest value, {number(top, 3)} at step {step}, is {number(top / (usual or 1), 2)} times the median."
    return [note + (far if top > BLOWN * usual > 0 else "")]


def _unseen(run: LoggedRun) -> list[str]:
    """Note how many steps between the logged ones are not seen."""
    judged = run.metrics.logged(run.metrics.norm or "") or loss_of(run.metrics)[1]
    steps = [step for step, _ in judged[-1000:]] or run.metrics.steps[-1000:]
    gaps = Counter(after - before for before, after in pairwise(steps))
    apart = gaps.most_common(1)[0][0] if gaps else 1
    if run.unit == "sample":
        return [f"The log counts samples in place of steps, {apart:,} from row to row."]
    if apart < 2 or run.unit == "row" or len(gaps) > 1 and 2 * len(gaps) >= len(steps) - 1 < 3:
        return []
    about = "one" if len(gaps) == 1 or 10 * gaps[apart] > 9 * len(steps) else "about one"
    return [f"Only {about} {run.unit} in {apart} is logged: a spike in between would not be seen."]


def _without_explosion(judged: Sequence[Sequence[Judged]]) -> str:
    """Describe a run without explosions by its largest norm."""
    steps = [step for segment in judged for step in segment if math.isfinite(step.norm)]
    above = [step.norm for step in steps if step.norm > 0]
    if not above:
        return (
            f"None of {plural(len(steps), 'gradient norm')} is above 0: this metric is no norm, or nothing is learned."
        )
    largest, normal = max(steps, key=lambda step: step.norm), median(above)
    others = [norm for norm in above if norm < largest.norm]
    if len(steps) < _MIN_NORMS and others and largest.norm >= EARLY * max(others):
        times, highest = number(largest.norm / max(others), 3), number(max(others), 3)
        return (
            f"{TOO_SHORT}: {plural(len(steps), 'step')}. The norm {number(largest.norm, 3)} at step "
            f"{largest.step} is {times} times the largest of the others, {highest}."
        )
    if len(steps) < _MIN_NORMS and largest.norm < EARLY * normal:
        norms = number(largest.norm, 3) if len(steps) == 1 else f"{number(min(above), 3)} to {number(largest.norm, 3)}"
        return f"{TOO_SHORT}: {plural(len(steps), 'step')}, of norm {norms}."
    if largest.norm >= EARLY / 2 * normal and any(largest in part and len(part) < 16 for part in judged):
        return (
            f"The gradient norm {number(largest.norm, 3)} at step {largest.step} is {number(largest.norm / normal, 3)} "
            "times the run's median, in a part of the log that is too short to judge."
        )
    times = number(largest.norm / normal, 2)
    return (
        f"No spike in {plural(len(steps), 'step')}: the largest gradient norm, {number(largest.norm, 3)} at step "
        f"{largest.step}, is {'about' if times == '1' else f'{times} times'} the run's median of {number(normal, 3)}."
    )


def _warmup(steps: Sequence[Judged], warmup: int, part: int) -> list[str]:
    """Note in which steps of a part of the log the trigger's rule could not flag a norm."""
    silent = [step.step for step in steps if step.threshold is None]
    if not silent:
        return []
    reported = f"only a norm above {EARLY:g} times the median is reported"
    if len(silent) == len(steps):
        num_finite = sum(math.isfinite(step.norm) for step in steps)
        if num_finite < warmup:
            count = f"{num_finite}" if num_finite == len(steps) else f"{num_finite or 'none'} with a finite norm"
            return [f"A threshold needs {warmup} steps, and this log has {count}, so {reported}."]
        return [f"The trigger's rule learned no threshold from {plural(num_finite, 'finite norm')}: {reported}."]
    where = " after a resume" if part else ""
    return [f"The first {len(silent)} steps{where} have no threshold yet: there, {reported}."]


def _overwritten(run: LoggedRun, told: Explosion | None = None) -> list[str]:
    """Note which steps a resume overwrote, and the worst norm that was discarded where ``told`` is not about it."""
    parts: dict[tuple[str, str], list[str]] = {}
    for segment, lost in run.overwritten:
        num_logged = max(sum(step in each.metrics.steps for each in run.segments) for step in lost)
        verb = "was" if len(lost) == 1 else "were"
        how = {1: "discarded", 2: "logged twice"}.get(num_logged, f"logged {num_logged} times")
        norms = [(norm, step) for step, norm in segment.metrics.logged(segment.metrics.norm or "") if step >= lost[0]]
        peak, step = max(norms, key=lambda entry: (not math.isfinite(entry[0]), entry[0]), default=(0.0, 0))
        is_told = not norms or told is not None and step in [each.step for each in told.steps]
        discarded = "" if is_told else f"{number(peak, 3)} at step {step}"
        parts.setdefault((f"{plural(len(lost), 'step')} ({ranges(lost)})", f"{verb} {how}"), []).append(discarded)
    made = []
    for (steps, how), discarded in parts.items():
        times = "" if len(discarded) == 1 else f" {len(discarded)} times"
        worst = [*dict.fromkeys(filter(None, discarded))]
        more = f"; the largest norm that was discarded is {listed(worst)}" if worst else ""
        made.append(f"The run was resumed{times}: {steps} {how}{more}.")
    return made


def _begin_of(worst: Explosion, explosions: Sequence[Explosion]) -> int:
    """Return where the explosions begin that lead to this one, without a pause or with a loss that stays higher: its
    effects are measured from there.

    One that did no harm leads to nothing.
    """
    first, pause = worst.first, _NEAR * interval(surviving(worst.segment))
    losses = loss_of(surviving(worst.segment))[1]
    for each in sorted(explosions, key=lambda explosion: -explosion.first):
        if each.segment is not worst.segment or each.first >= first:
            continue
        last = each.steps[-1].step
        before = [loss for step, loss in losses if step < each.first][-_NEAR:]
        since = [loss for step, loss in losses if last < step < first]
        stays = len(since) >= _LEVEL <= len(before) and median(since) > 1.5 * median(before) > 0
        if (first <= last + pause or stays) and _effects(each)[1] is not False:
            first = each.first
    return first


def _effects(worst: Explosion, since: int | None = None) -> tuple[str, bool | None]:
    """Describe an explosion's effects, and return whether they hurt; None where that is not known.

    ``since`` is the step before which metrics are as usual; its own first one if None.
    """
    metrics, since = surviving(worst.segment), worst.first if since is None else since
    if worst.steps[-1].step == metrics.steps[-1] and worst.first == metrics.steps[-1]:
        name, logged = loss_of(metrics)
        before = [value for step, value in logged if step < worst.first and math.isfinite(value)][-_LEVEL:]
        if before and logged[-1][0] == worst.first:
            loss = logged[-1][1]
            if loss > 1.3 * max(before) > 0 or not math.isfinite(loss):
                was = number(median(before), 3)
                return f"{capitalized(name)} is {number(loss)} at that step, and was {was} before.", True
        return f"What this did to the {_deciding(metrics)} is not in the log.", None
    changes: list[str] = []
    steady: list[str] = []
    lasting: set[str] = set()
    is_growth = worst.kind == "growth"  # the steps of a growth show their own effects
    within, last = (None, worst.first) if is_growth else (_WITHIN, worst.steps[-1].step)
    for effect in EFFECTS:
        known, title = metrics.known(metrics.first(effect.names)), effect.title
        if effect is LOSS and not loss_of(metrics)[1]:
            continue  # where there is a reward, the loss says nothing
        change = _change(known, since, effect.fall, effect.rise, within)
        if change:
            changes.append(f"{title} {change.sentence}")
            if not change.is_back:
                lasting.add(title)
            elif title in _DECIDING:
                steady.append(title)
        elif sum(step > last for step, _ in known) >= _LEVEL and title in ("reward", "entropy", "loss"):
            steady.append(title)
    hurt = True if _DECIDING & lasting else None
    if not lasting and _DECIDING & {*steady}:
        hurt = False
    if changes:
        effects = "; ".join(changes)
    elif steady:
        start = metrics.steps.index(worst.first)
        end = None if within is None else start + within + 1
        num_steps = metrics.steps[start:end][-1] - worst.first
        when = "of this growth" if is_growth else "after it"
        effects = f"{' and '.join(steady)} held in the {plural(num_steps, 'step')} {when}"
    else:
        effects = "what this did is not known, as the log has no reward, entropy or loss"
        if any(metrics.first(effect.names) for effect in EFFECTS):
            effects = f"too few steps follow in the log to see what this did to the {_deciding(metrics)}"
    return f"{capitalized(effects)}.", hurt


def aftermath(worst: Explosion) -> list[Aftermath]:
    """Return metrics around an explosion for small curves: reward and entropy, then those that changed, then others."""
    metrics, made = surviving(worst.segment), []
    last = worst.steps[-1].step
    for title, names, fall, rise, _ in EFFECTS:
        known = metrics.known(metrics.first(names))
        before = [point for point in known if point[0] < worst.first][-_NEAR:]
        near = before + [point for point in known if worst.first <= point[0] <= last]
        after = [point for point in known if point[0] > last][:_NEAR]
        change = _change(known, worst.first, fall, rise)
        if len(before) >= 3 and after and len({value for _, value in near + after}) > 1:
            was, now = (median(value for _, value in part[-_LEVEL:]) for part in (before, after))
            made.append(Aftermath(title, (*near, *after), was, now, change is not None and not change.is_back))
    made.sort(key=lambda part: (part.title not in ("reward", "entropy"), not part.is_worse))
    return made[:_MAX_CURVES]


class _Change(NamedTuple):
    """A metric's change after a step."""

    sentence: str
    is_back: bool
    """Whether it came back."""


def _change(
    known: Sequence[tuple[int, float]], step: int, fall: float | None, rise: float | None, within: int | None = _WITHIN
) -> _Change | None:
    """Return a metric's change in the values after a step, ``within`` of them; None where it only scattered."""
    before = [value for at, value in known if at <= step][-_NEAR:]
    after = [(at, value) for at, value in known if at > step]
    near = after[:within]
    if not before or not near:
        return None
    usual = median(before)
    lower, upper = sorted((usual, median(before[-_LEVEL:])))  # the last ones may be the beginning of the change
    scatter = 4 * median(abs(value - usual) for value in before)
    low, high = min(value for _, value in near), max(value for _, value in near)
    lowest = -math.inf if fall is None or upper == 0 else upper - max(scatter, (1 - fall) * abs(upper))
    highest = math.inf if rise is None or lower <= 0 else max(rise * lower, lower + scatter)
    if low < lowest:
        verb, reached, was = "fell", low, upper
    elif high > highest:
        verb, reached, was = "rose", high, lower
    else:
        return None
    there, most = next((at, value) for at, value in near if abs(value - was) >= 0.9 * abs(reached - was))
    mostly = ", most of it" if number(most, 2) != number(reached, 2) else ""
    change = f"{verb} from {number(was, 2)} to {number(reached, 2)}{mostly} within {plural(there - step, 'step')}"
    ends = [value for _, value in after[-_LEVEL:]]
    last = ends[-2:] if len(after) > 3 else ends[-1:]
    are_back = [value >= lowest if verb == "fell" else value <= highest for value in (median(ends), *last)]
    is_back = len(after) > 2 * _LEVEL and are_back[0] and reached not in ends or len(after) > 1 and all(are_back[1:])
    earlier = [value for at, value in known if at <= step][-4 * _WITHIN : -_NEAR]
    as_far = sum(value <= reached if verb == "fell" else value >= reached for value in earlier)
    if is_back and as_far > 1:
        return None  # noise that came as far before
    return _Change(f"{change} and came back to {number(median(ends), 2)}" if is_back else change, is_back)


def _is_overwritten(run: LoggedRun, explosion: Explosion) -> bool:
    """Return whether the run was resumed from before it, and logged its step again."""
    return any(explosion.peak.step in lost for segment, lost in run.overwritten if segment is explosion.segment)


def _is_left_behind(run: LoggedRun, explosions: Sequence[Explosion]) -> bool:
    """Return whether a resume from before the explosions got past the worst of them, the first, without another."""
    worst = explosions[0]
    is_past = all(each.segment is not run.segments[-1] for each in explosions)
    return is_past and run.metrics.steps[-1] > worst.peak.step and _is_overwritten(run, worst)


def _count_again(explosions: Sequence[Explosion]) -> int:
    """Return in how many parts of the log the run came to the worst explosion, the first, at the same step."""
    return len({id(each.segment) for each in explosions if each.first == explosions[0].first})


def _others(explosions: Sequence[Explosion]) -> list[str]:
    """List the explosions besides the worst in sentences, without those that are its effect; empty without any."""
    worst, *others = explosions
    made = []
    if (num_again := _count_again(explosions)) > 1:
        made.append(f"The run failed like this {num_again} times at step {worst.first}: a resume did not get past it.")
        others = [other for other in others if other.first != worst.first]
    is_broken = worst.kind in ("collapse", "level")  # what follows it is its effect
    last = worst.segment.last if is_broken else worst.first
    others = [other for other in others if not other.is_start and not worst.first < other.first <= last]
    if not others:
        return made
    shown = sorted(others[:6], key=lambda other: other.first)
    peaks = Counter(f"{other.peak.step} ({number(other.peak.norm, 3)})" for other in shown)
    steps = ", ".join(peak if times == 1 else f"{peak}, {times} times" for peak, times in peaks.items())
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return [*made, f"{plural(len(others), 'other spike')}: step {steps}{more}."]


def _advise_resume(
    run: LoggedRun, explosions: Sequence[Explosion], is_hurt: bool | None, is_sound: bool
) -> tuple[str, str]:
    """Say whether and where to go back because of the worst explosion, the first, and return the options that do it."""
    worst = explosions[0]
    is_first = bool(worst.lost) and worst.first == run.segments[0].first
    begin = begins(run) if is_first else "start"
    earlier = " It began before this log." if is_first and begin == "late" else ""
    if earlier and worst.kind in ("lost", "end") and not is_sound:
        return EARLIER, ""
    if is_sound and worst.kind == "lost":
        return (
            f"No need to go back: most likely these steps were skipped, as fp16's scaler does.{earlier} While each is "
            "skipped nothing is learned: train in bf16 with the weights in fp32, or log each layer's norm to see which "
            "is not finite."
        ), ""
    if is_sound and len(worst.lost) == len(worst.steps):
        return (
            "No need to go back: the step was skipped, as fp16's loss scaler skips it. Look again if many follow.",
            "",
        )
    peak, on = worst.peak.step, turn_on(run)
    end = ", with GradLoc on for the next spike:" if on else "."
    if _is_left_behind(run, explosions):
        return f"The resumed run got past step {peak}: continue{end}", on
    if worst.kind in HARMLESS:
        return f"No need to resume. Continue the run{end}", on
    if is_hurt is False and worst.kind != "growth":
        deciding = _deciding(run.metrics)
        worse = "higher" if deciding == "loss" else "lower"
        return f"No need to resume: the {deciding} is no {worse} than before the spike. Continue the run{end}", on
    if is_first and begin != "late" and worst.kind in ("lost", "end"):
        return (
            f"{from_start('The norm', begin)} a restart with the same settings will fail as this one did. Look at the "
            "precision, the learning rate, and the first batch's data and labels."
        ), ""
    is_certain = is_hurt or worst.kind == "lost" or (worst.kind == "growth" and is_hurt is None)
    deciding = _deciding(run.metrics)
    verb = "rises" if deciding == "loss" else "falls"
    logged = [step for step, _ in surviving(worst.segment).logged(worst.segment.metrics.norm or "")]
    losses = loss_of(surviving(worst.segment))[1]
    first = onset(losses, _begin_of(worst, explosions)) if is_hurt else worst.first
    last = max((step for step in logged if step < first), default=first - 1)
    before = last + 1 if interval(run.metrics) > 1 else first
    condition = "" if is_certain else f"If the {deciding} {verb}, "
    if worst.segment is run.segments[-1] and worst.segment.before is not None and _count_again(explosions) > 1:
        tried = min(each.segment.first for each in explosions if each.segment.before is not None)
        sentence, command = _resume(run, tried - 1, "go further back: ")
        change = f"skip the batches around step {worst.first}, lower the learning rate, or {sentence}"
        return f"Change something before the next resume: {change}", command
    sentence, command = _resume(run, before, condition)
    return f"{earlier.strip()} {sentence}".strip(), command


def _deciding(metrics: Metrics) -> str:
    """Return the metric that decides whether a run is healthy: its reward, else its loss."""
    is_of_rewards = any(name.startswith(("actor/", "critic/")) or "reward" in name for name in metrics.own_names)
    return "loss" if loss_of(metrics)[1] or not is_of_rewards else "reward"


ON = "+gradloc=observe"
"""Switches GradLoc on in verl."""


def turn_on(run: LoggedRun) -> str:
    """Return the line that switches GradLoc on in the run's trainer; empty where there is none."""
    if is_trl(run.trainer):
        name = trainer_class(run.metrics)
        return f'from gradloc.trl import {name}; {name}(..., gradloc="observe")'
    return ON if run.trainer.startswith("verl") else ""


def _resume(run: LoggedRun, before: int, condition: str) -> tuple[str, str]:
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
        sentence += ". The log gives no steps, so look by the epoch" if run.metrics.place(before) else ""
    elif not where and saved is not None:
        where = run.saved[saved]
        sentence += f" (the log says that step {saved:,} was saved)"
    if is_trl(run.trainer):
        return f"{sentence}:", f'trainer.train(resume_from_checkpoint="{where or "OUTPUT_DIR/checkpoint-N"}")'
    if run.trainer.startswith("verl"):
        path = shlex.quote(where) if where else "CHECKPOINTS/global_step_N"
        return f"{sentence}:", f"trainer.resume_mode=resume_path trainer.resume_from_path={path} {ON}"
    return f"{sentence}{f', {where}' if where else ''}.", ""
