# SPDX-License-Identifier: Apache-2.0
"""Diagnose a run by its log alone: what exploded, what that did to the run, and what to do now."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from ...explain.advice import sampling_cut
from ...explain.numbers import number
from ...explain.text import in_unit, plural
from ...health.rules import SCORES
from ..logs.names import is_gan_loss, is_norm
from ..logs.segments import LoggedRun, surviving
from ..memory import uncollected
from .course import course, end_of, reward_course
from .effects import begin_of, effects_of, fall_meanwhile, loss_at
from .findings import findings, lost_loss, minor_skips
from .health import LOSSES, TOO_SHORT
from .levels import NEAR
from .overview import overview
from .resuming import advise, count_again, is_left_behind, is_overwritten, overwritten, resume_before
from .signals import EFFECTS, LOSS, Sign, interval, is_adversarial, loss_of, sound_loss
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

_LEAD = 16
"""Rows before a spike from which a rise of the loss is not its effect."""
_MIN_NORMS = 8
"""A run with fewer norms is not judged."""


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
    begin: int | None = None
    """The first step that shows the fault; None where nothing was found, or no step is known."""
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
    def is_minor(self) -> bool:
        """Whether the worst explosion is a small one that did no harm."""
        worst = self.worst
        is_back = worst is not None and self.kind in ("back", *HARMLESS) and not worst.lost
        return is_back and worst.times < EARLY

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
    limits += overwritten(run, explosions[0] if explosions else None)
    made = Diagnosis(run, "", explosions=explosions, limits=[*dict.fromkeys(limits)], judged=judged)
    kind, masked = clipped_or_zero(judged, [value for _, value in loss_of(run.metrics)[1]])
    if made.explosions:
        made.limits += [masked] if masked else []
        _describe_worst(made, signs)
        graver = [sign for sign in signs if sign.kind in ("unfinite", *UNRECOVERED)]
        if graver and (made.is_minor or _is_before(graver[0], made)):
            spike, made.sentences = made.headline, []
            _lead_with(made, graver)
            made.sentences.insert(-1, spike)
        return made
    made.kind, made.headline = kind, masked or _without_explosion(judged)
    made.is_judged = bool(kind or signs) or sum(map(len, judged)) >= _MIN_NORMS
    if not kind and not signs and made.is_judged:
        made.headline = f"{made.headline} {_course(run)}".rstrip()
    if kind == "zero" and (shown := [sign for sign in signs if sign.kind in ("unfinite", "fell", "collapse", "loss")]):
        _lead_with(made, shown)
        made.sentences.insert(0, made.headline)
        made.kind, made.headline = kind, masked
    elif signs and kind != "zero":
        made.limits += [masked] if masked else []
        _lead_with(made, signs)
    return made


def _is_before(sign: Sign, made: Diagnosis) -> bool:
    """Return whether a loss rose for long before the spikes of a run that did not recover began."""
    since = begin_of(made.explosions[0], made.explosions)
    apart = interval(surviving(made.explosions[0].segment))
    return made.kind == "collapse" and sign.kind == "fell" and sign.first + _LEAD * apart < since


def _without_norms(run: LoggedRun, signs: list[Sign]) -> Diagnosis:
    """Diagnose a run that logs no gradient norm."""
    missing = missing_norm(run.parts[-1], run.name)
    made = Diagnosis(run, missing, limits=[*_unsized(run), *_unseen(run), *minor_skips(run), *overwritten(run)])
    counts = (len(run.metrics.known(name)) for effect in EFFECTS for name in effect.names)
    made.is_judged = bool(signs) or max(counts) >= NEAR
    if signs:
        made.limits[:0] = [missing] if set(run.parts[-1].series) - {"skipped", "loss scale"} else []
        _lead_with(made, signs)
        return made
    if not any(map(is_norm, run.metrics.own_names)) and (said := _course(run)):
        if not made.is_judged and (loss_of(run.metrics)[1] or run.metrics.first(SCORES)):
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
    if (level := end_of(values)) is not None:
        went += f" ({number(level, 3)} in the median of the last ones)"
    if not loss_of(run.metrics)[1] and run.metrics.first(SCORES):
        return went + reward_course(values)
    if not loss_of(run.metrics)[1]:  # whether it should rise or fall is not known
        return f"{went}."
    if is_adversarial(run.metrics):
        return went + _gan_losses(run, name)
    return went + (course(values) if len(values) >= NEAR else ".")


def _gan_losses(run: LoggedRun, name: str) -> str:
    """End a sentence on one of a GAN's losses with the levels of all of them."""
    others = [own for own in run.metrics.own_names if is_gan_loss(own)]
    known = [(own, run.metrics.known(own)) for own in dict.fromkeys([name, *others[:4]])]
    levels = ((own, [value for _, value in of], -(-len(of) // 5)) for own, of in known if of)
    fifths = (f"{own} {number(median(of[:n]), 3)} and {number(median(of[-n:]), 3)}" for own, of, n in levels)
    return f". Medians of the first and the last fifth: {', '.join(fifths)}."


def _main_series(run: LoggedRun) -> tuple[str, list[tuple[int, float]]]:
    """Return the name and values of a run's reward, else of its loss, else of any metric."""
    metrics = run.metrics
    if (loss := loss_of(metrics))[1]:
        return loss
    if reward := metrics.first(SCORES):
        return metrics.own(reward), metrics.known(reward)
    others = [] if metrics.norm else overview(metrics)
    return (others[0].name, others[0].known) if others else loss


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
        replace(each, is_start=False, kind="back") if each.is_start and effects_of(each)[1] else each for each in found
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
    since = begin_of(worst, made.explosions)
    effects, is_hurt = effects_of(worst, since)
    if since < worst.first and not worst.is_start:
        made.sentences.append(f"The spikes that lead to it begin at step {since}.")
    if sound:
        effects, is_hurt = f"{sound}, so the weights are not NaN.", False
    elif worst.lost and is_hurt is None:
        effects = lost_loss(run, worst.lost) or effects
    is_followed = worst.kind == "end" and worst.peak is not worst.steps[-1]
    if is_hurt and (worst.kind in ("back", "level") or is_followed):
        made.explosions[0] = worst = replace(worst, kind="collapse")
    if worst.kind == "level" and is_hurt is False and (fell := fall_meanwhile(worst)):
        made.explosions[0] = worst = replace(worst, kind="learning")
        effects = fell
    made.kind, made.begin = worst.kind, worst.first
    also = [sign.sentence for sign in signs if sign.kind in ("unfinite", "skipped", "overfit")]
    if worst.kind in ("back", *HARMLESS):  # a jump of the loss elsewhere is another finding
        near = range(worst.first, worst.steps[-1].step + 2)
        also += [sign.sentence for sign in signs if sign.kind == "loss" and sign.first not in near]
    is_short = worst.kind == "back" or len(worst.steps) == 1
    made.sentences += loss_at(worst) if is_short and not worst.lost else []
    made.sentences += also if worst.lost and is_hurt is None and also else [effects, *also]
    losses = run.metrics.logged(run.metrics.first(LOSSES)) if worst.lost else []
    after = [value for step, value in losses if step >= worst.lost[0]]
    if is_hurt is None and after and not any(map(math.isfinite, after)):
        is_hurt = True
    made.is_left_behind = is_left_behind(run, made.explosions)
    if is_overwritten(run, worst) and count_again(made.explosions) < 2:
        made.sentences.append(
            f"The run was later resumed from before step {worst.peak.step}, so a plot may show the later values only."
        )
    made.sentences += _others(made.explosions)
    advice, made.command = advise(run, made.explosions, is_hurt, bool(sound))
    if not is_hurt and (overfit := [sign.advice for sign in signs if sign.kind == "overfit"]):
        advice, made.command = overfit[0], ""
    tokens = _on_tokens(run, worst.peak.step, "GradLoc on" in advice) if worst.kind != "learning" else ""
    made.sentences.append(f"{tokens} {advice}".lstrip())


def _on_tokens(run: LoggedRun, step: int, is_on_advised: bool) -> str:
    """Say where the tokens of a step's spike are named, or why they are not; ``is_on_advised``: other advice says to
    turn GradLoc on.
    """
    metrics = run.metrics
    if not any(name.startswith("gradloc/") for name in metrics.series):
        is_loop = run.trainer == "other"
        turn_on = "add gradloc.Watch(model, optimizer) to the loop" if is_loop else "train with GradLoc on"
        return "A log cannot show which tokens did it" + ("." if is_on_advised else f", so {turn_on}.")
    spikes, thresholds = (dict(metrics.logged(f"gradloc/{name}")) for name in ("spikes", "threshold"))
    if spikes.get(step) != 0:
        return "GradLoc wrote which tokens did it: name the folder of its events, which gradloc.dump_dir set."
    why = "its threshold is higher" if step in thresholds else "a run's first steps have no threshold (trigger.warmup)"
    return f"GradLoc was on, and took step {step} for no spike: {why}."


def _lead_with(made: Diagnosis, found: list[Sign]) -> None:
    """Make findings of other metrics than the norm the headline and the sentences of a diagnosis."""
    first, *others = found
    made.kind, made.headline, made.begin = first.kind, first.sentence, first.first
    made.sentences += [finding.sentence for finding in others]
    before = [finding.before for finding in found if finding.before is not None]
    if before and not first.advice:
        sentence, made.command = resume_before(made.run, min(before), "")
        made.sentences.append(sentence)
    else:
        back = "No need to resume: it came back by itself. " if first.is_back else ""
        made.sentences.append(first.advice or f"{back}A log cannot show why; turn GradLoc on for the next run.")


def _unsized(run: LoggedRun) -> list[str]:
    """Note that a GAN's loss is judged only by whether it is finite."""
    name = loss_of(run.metrics)[0]
    if not is_adversarial(run.metrics):
        return []
    return [f"{name} is a GAN's, so its level shows no fault: only what is not finite, and bursts, are judged."]


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
    return [f"Only {about} {run.unit} in {apart} is logged, so a spike in between would not be seen."]


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
            f"{largest.step} is {times} times the largest other norm ({highest})."
        )
    if len(steps) < _MIN_NORMS and largest.norm < EARLY * normal:
        norms = f"norm is {number(largest.norm, 3)}"
        if len(steps) > 1:
            norms = f"norms are {number(min(above), 3)} to {number(largest.norm, 3)}"
        return f"{TOO_SHORT}: {plural(len(steps), 'step')}, whose {norms}."
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
    reported = f"only norms above {EARLY:g} times the median are reported"
    if len(silent) == len(steps):
        num_finite = sum(math.isfinite(step.norm) for step in steps)
        if num_finite < warmup:
            has = f"{num_finite}, so {reported}" if num_finite else "none, so no norm can be judged"
            return [f"Setting a threshold takes {warmup} steps with a finite norm, and this log has {has}."]
        return [f"The trigger's rule learned no threshold from {plural(num_finite, 'finite norm')}, so {reported}."]
    where = " after a resume" if part else ""
    return [f"The first {len(silent)} steps{where} have no threshold yet, so {reported} there."]


def _others(explosions: Sequence[Explosion]) -> list[str]:
    """List the explosions besides the worst in sentences, without those that are its effect; empty without any."""
    worst, *others = explosions
    made = []
    if (num_again := count_again(explosions)) > 1:
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
