# SPDX-License-Identifier: Apache-2.0
"""Reads the lines in which a trainer says that it skipped an optimizer step, as fp16's loss scalers do."""

import functools
import re
from collections import Counter, defaultdict
from dataclasses import replace

from .grammars import DRAWN, Grammar
from .pairs import NUMBER, as_float
from .recording import Skip

_SKIPPED = re.compile(
    r"(overflow(?:!| detected| occurs|\. +skip))"
    r"|skipping (?:the |this )?(?:optimi[sz]er |gradient |weight )?(?:step|updat(?:e|ing))\b"
    r"|do not update (?:the )?model|grad(?:ient)?[_ ]norm is not finite|bad grad(?:ient)?[_ ]norm"
    r"|(reducing dynamic loss scale)",
    re.IGNORECASE,
)
_SCALE = re.compile(
    rf"scale\D{{0,3}}(?: to| from)?:? *({NUMBER}),?(?: reducing)? to ({NUMBER})|scale to:? *({NUMBER})", re.IGNORECASE
)
_NAN_LOSS = re.compile(
    r"diverged with loss|\bloss became (?:infinite|nan)|\bnan loss (?:encountered|during|detected|with)"
    r"|(?:received|got|found|detected)(?: an?)? nan loss|\bloss is \S+ stop"
    r"|loss = \S+ is not finite|unexpected result (?:nan|inf)",
    re.IGNORECASE,
)
_AT_MINIMUM = re.compile(
    r"loss scale already at minimum|minimum loss scale reached|grad[_ ]scale is too small", re.IGNORECASE
)
_OVERFLOWED_AT = re.compile(r"overflow on iteration:? (\d{1,12})\b", re.IGNORECASE)
_COUNTED = re.compile(r"\bstep=(\d{1,12}), skipped=(\d{1,12})\b")
_LOST = re.compile(r"norm(?: is |=)(?:nan|inf|not finite)", re.IGNORECASE)
OF_SKIPS = (
    *("verflow", "OVERFLOW", "kipping", "inimum", "o not update", "not finite", "diverged", " loss ", "became"),
    *("topping", "result", "skipped=", "cale is", "ad grad"),
)
_MOST_SKIPS = 10_000
"""Lines of skipped steps that are kept."""


class SkippedSteps:
    """The lines in which a trainer says that it skipped an optimizer step, as fp16's loss scalers do."""

    def __init__(self, grammars: list[Grammar]) -> None:
        self.step: int | None = None
        """The last message on a line without values."""
        self._last: dict[bool, Skip] = {}
        """The last message of the scaler itself, which DeepSpeed prints next to another, and the last other one."""
        self._said: int | None = None
        """The iteration that DeepSpeed says has overflowed."""
        self.counts: list[tuple[int, int]] = []
        """Steps, and how many of them were skipped, as DeepSpeed counts them."""
        self._grammars = grammars
        self._found: list[tuple[Skip, list[tuple[str, int] | None], bool]] = []
        """Skips, with the rows before them by each grammar, and whether the scaler itself says it."""
        self._grows = False
        """Whether a scale was seen to rise to a new one: then it may fall to one that it has been at."""
        self._seen: dict[tuple, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """How often each process printed a message, by the message and the rows before it."""

    def take(self, line: str, taken: Grammar | None, process: str = "") -> None:
        """Takes a line; ``taken`` is the grammar that has read a step from it."""
        if said := _OVERFLOWED_AT.search(line):
            self._said = int(said[1])
        skip = skip_in(line)
        if (counts := _COUNTED.search(line)) and len(self.counts) < _MOST_SKIPS:
            self.counts.append((int(counts[1]), int(counts[2])))
        if skip is None or skip.is_nan_loss and taken or len(self._found) > _MOST_SKIPS or line.startswith("# "):
            return
        is_scalers = "educing dynamic" in line
        last = self._last.get(is_scalers)
        step = self._said or (self.step if taken or skip.step is None else skip.step)
        is_same = last and (last.before, last.scale) == (skip.before, skip.scale) and self._said in (None, last.step)
        if is_same and skip.before and skip.scale < skip.before:
            return  # the same one, of another rank: a scale falls but once from where it is
        skip = replace(skip, step=step, is_after=taken is None and self.step is None and not self._said)
        places = [grammar.last for grammar in self._grammars]
        # of one overflow, each rank has its line: the bar may have gone on between them
        has_scale = skip.scale is not None
        alike = replace(skip, step=None) if has_scale and process and not self._said else skip
        times = self._seen[(is_scalers, alike, *places)]
        times[process] += 1
        is_new = times[process] > max((count for other, count in times.items() if other != process), default=0)
        if last and has_scale and last.scale is not None and skip.scale > last.scale:
            self._grows |= all(skip.scale != known.scale for known, *_ in self._found)
        is_again = times[process] > 1 and (has_scale or skip.is_end)  # without growth, a scale falls each time
        if is_new and (not is_again or self._grows and last is not None and skip.scale != last.scale):
            self._found.append((skip, places, is_scalers))
            self._last[is_scalers] = skip

    def found_in(self, best: Grammar) -> list[Skip]:
        """Return the skipped steps, each with the step of the log's own rows that it came after, or came with."""
        at = self._grammars.index(best)
        said = Counter((skip.before, skip.scale, is_scalers) for skip, _, is_scalers in self._found if skip.scale)
        skips = []
        for skip, places, is_scalers in self._found:
            own, others = (said[skip.before, skip.scale, is_its] for is_its in (is_scalers, not is_scalers))
            if others and own < others + is_scalers:
                continue  # the scaler's message next to another one, or the other next to more of the scaler's
            place = places[at]
            row = place[1] if place else -1 if best.has_places else None
            is_own = skip.step is not None and best.unit != "row"
            skips.append(replace(skip, step=skip.step if is_own else best.step_at(place), row=row))
        (rows,) = best.rows.values() if len(best.rows) == 1 else [[]]
        if len(skips) > 1 and [skip.row for skip in skips] == [*range(-1, len(rows) - 1)]:  # one before each row
            skips = [replace(skip, step=step, is_after=False) for skip, (step, _) in zip(skips, rows, strict=True)]
        return skips


@functools.lru_cache(maxsize=64)
def skip_in(line: str) -> Skip | None:
    """Return what a line says of a skipped step, with the step of a progress bar on it; None where it says nothing."""
    is_end, skipped, is_nan = (form.search(line) for form in (_AT_MINIMUM, _SKIPPED, _NAN_LOSS))
    if not (is_end or skipped or is_nan):
        return None
    drawn, scale = DRAWN.search(line), _SCALE.search(line)
    return Skip(
        step=int(drawn[1]) if drawn else None,
        is_after=True,
        is_overflow=bool(is_end or skipped and (skipped[1] or skipped[2])),
        before=as_float(scale[1]) if scale and scale[1] else None,
        scale=as_float(scale[2] or scale[3]) if scale else None,
        is_lost=_LOST.search(line) is not None,
        is_end=is_end is not None,
        is_nan_loss=is_nan is not None and skipped is None,
    )
