# SPDX-License-Identifier: Apache-2.0
"""Puts the report together: one HTML file that needs nothing else and can reach nothing else.

The security policy allows exactly the one script and the one style sheet inside, by their hash, and
no request of any kind. Token text enters through jinja2's autoescape or the escaped JSON payload.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...evidence.numbers import number, percent
from ...evidence.record import Event
from ..figures import curves as figures
from ..figures import style as palettes
from ..runs import tokens
from ..runs.comparison import Comparison
from ..runs.health import RunHealth, judge, ranges
from ..runs.run import RunFolder
from ..text import one_line, plural, visible
from . import analyses
from .eventview import EventView, culprit_count, full_view, plain_view, severity

INLINE = 10
"""Up to so many events stand one below the other; of more, one is open at a time."""
DETAILED = 40
"""Events that get pictures and token arrays: the worst ones."""
SPANS = 120
"""Parts that the strip of states has at most; each that is not healthy can be tabbed to."""
SHOWN_TOKENS = 4000
"""Tokens that the page shows before anything is unfolded."""
BUDGET = {"one": 6_000_000, "many": 1_100_000}
"""Bytes of token arrays in a page of one event, and of several."""

Progress = Callable[[Iterable[Event], int], Iterable[Event]]


def render(run: RunFolder, events: list[Event] | None = None, progress: Progress | None = None) -> str:
    """The whole report of a run.

    Args:
        run: what was read; sentences about what could not be read are added to its notes.
        events: the events to show in detail; all of them when None.
        progress: wraps the loop over the events.
    """
    chosen = run.events if events is None else events
    is_inline = len(chosen) <= INLINE
    worst = sorted(chosen, key=severity, reverse=True)
    detailed = {event.event_id for event in worst[:DETAILED]}
    size = BUDGET["one" if len(chosen) == 1 else "many"] // tokens.BYTES_PER_TOKEN
    budget = size // max(len(detailed), 1)
    shown = SHOWN_TOKENS // max(len(chosen), 1) if is_inline else SHOWN_TOKENS // 4
    views: list[EventView] = []
    payload: dict[str, Any] = {}
    root = run.events_root or run.path
    for index, event in enumerate(progress(chosen, len(chosen)) if progress else chosen):
        if event.event_id not in detailed:
            views.append(plain_view(event, root))
            continue
        view, note = full_view(event, root, f"e{index}", budget, shown)
        if note:
            run.notes.append(note)
        views.append(view)
        payload[event.event_id] = {"s": [tokens.payload(s, i, view.shades) for i, s in enumerate(view.sequences)]}
    health = judge(run.metrics)
    return _fill(
        "report.html",
        run=run,
        views=views,
        lead=next((v for v in views if v.event is worst[0]), None) if worst else None,
        is_inline=is_inline,
        num_detailed=len(detailed),
        facts=facts(run),
        curves=curves(run, health),
        health=health,
        analyses=analyses.sections(run.path),
        payload={"labels": tokens.LABELS, "events": payload},
    )


def render_comparison(name: str, **parts: Any) -> str:
    """A page of another template with the same frame."""
    return _fill(name, payload={}, **parts)


def curves(run: RunFolder, health: RunHealth) -> list[str]:
    """The run's curve, wide and for a phone; nothing when there is nothing to draw."""
    if not run.metrics and not run.events:
        return []
    return [
        figures.curve(run.metrics, run.events, width, name, health.spans(most))
        for width, name, most in ((940, "curve-wide", SPANS), (370, "curve-narrow", SPANS // 3))
    ]


def overlays(runs: list[RunFolder], found: Comparison) -> list[str]:
    """The compared runs' curves, wide and for a phone; nothing when no run has metrics."""
    labelled = [(one_line(name, 40), run.metrics) for name, run in zip(found.names, runs, strict=True)]
    made = [figures.overlay(labelled, width, name) for width, name in ((940, "wide"), (370, "narrow"))]
    return [picture for picture in made if picture is not None]


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    made = [("events", number(len(run.events)))]
    explained = sum(event.certificate.verdict == "explained" for event in run.events)
    if run.events:
        made.append(("explained", f"{number(explained)} of {number(len(run.events))}"))
        causes = [c.cause.label for event in run.events for c in event.culprits]
        if causes:
            common = max(sorted(set(causes)), key=causes.count)
            made.append(("commonest cause", common.replace("_", " ")))
        spent = [e.search.seconds for e in run.events if e.search.seconds is not None]
        made.append(("spent searching", f"{number(sum(spent), 3)} s"))
    if run.metrics:
        made.append(("steps", number(len(run.metrics.steps))))
        norms = sorted(run.metrics.finite(figures.MEAN))
        if norms:
            made.append(("median norm", number(norms[len(norms) // 2], 3)))
    return made


def _fill(template: str, payload: dict[str, Any], **context: Any) -> str:
    style, script = _style(), _asset("report.js")
    policy = (
        "default-src 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=PackageLoader("gradloc.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        number=number,
        percent=percent,
        visible=visible,
        one_line=one_line,
        svg=Markup,
        plural=plural,
    )
    environment.globals.update(culprit_count=culprit_count, level=_level, ranges=ranges)
    made = environment.get_template(template).render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        payload=escape_json(payload),
        **context,
    )
    # A lone surrogate in a name or a path cannot be written as UTF-8.
    return made.encode("utf-8", errors="replace").decode("utf-8")


def _level(view: EventView, sequence: int, position: int) -> str:
    """The letter that shades a token at first."""
    return view.shades[0].levels[sequence][position] if view.shades else "-"


def _style() -> str:
    """The style sheet, with the palette's two themes put in."""
    sheet = _asset("report.css")
    for name, palette in (("LIGHT", palettes.LIGHT), ("DARK", palettes.DARK)):
        sheet = sheet.replace(f"/* {name} */", palettes.variables(palette))
    return sheet


def _asset(name: str) -> str:
    return resources.files("gradloc.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def escape_json(value: Any) -> Markup:
    """JSON that can stand inside a script element: nothing in it can end the element.

    >>> escape_json({"t": "</script>"})
    Markup('{"t":"\\\\u003c/script\\\\u003e"}')
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def write(path: Path, text: str) -> None:
    """Write the page whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)
