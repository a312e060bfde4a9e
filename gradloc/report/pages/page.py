# SPDX-License-Identifier: Apache-2.0
"""Renders the report: one HTML file that needs no other file and can make no request.

The security policy allows only its own script and style sheet, by their hashes. Token text enters through jinja2's
autoescape or the escaped JSON payload.

Up to ``INLINE`` events are plain HTML. Of more, the worst ``DETAILED`` are compressed, and the browser unpacks one when
it is opened; the others are rows of the list.
"""

import base64
import hashlib
import json
import zlib
from collections import Counter
from functools import cache
from importlib import resources
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ...explain.numbers import number, percent
from ...explain.story import culprits_in_words
from ...explain.text import in_unit, one_line, plural, printable, spoken, visible
from ..errors import ReportError
from ..figures import drawings
from ..figures.palette import DARK, LIGHT, variables
from ..runs import tokens
from ..runs.buckets import read_analyses
from ..runs.diagnosis import Diagnosis
from ..runs.effects import aftermath
from ..runs.events import Events
from ..runs.health import judge, ranges
from ..runs.run import RunFolder
from . import script_data
from .document import EventDocument, course_table, document, place_in_batch
from .exports import issue
from .panel import Panel

INLINE = 10
"""Most events shown one below the other; of more, one is open at a time."""
DETAILED = 40
"""Most events with all of their details: the worst ones."""
SHOWN_TOKENS = 4000
"""Tokens shown before anything is unfolded."""
BUDGET = {"one": 6_000_000, "many": 1_100_000}
"""Bytes of token arrays in a page of one event or of several."""
ANALYSES = 6
"""Most gradient analyses drawn, the latest ones."""
SCRIPTS = ("base", "chart", "tokens", "events", "keys")
"""Parts of the one script, in order."""


def render(run: RunFolder, events: Events | None = None) -> str:
    """Render the report of a run with these events, or with all.

    Sentences about parts that cannot be read are added to the run's notes.
    """
    chosen = run.events if events is None else events
    is_inline = len(chosen) <= INLINE
    order = sorted(range(len(chosen)), key=lambda index: chosen.rows[index].severity, reverse=True)[:DETAILED]
    worst = [chosen[index] for index in order]
    budget = BUDGET["one" if len(chosen) == 1 else "many"] // tokens.BYTES_PER_TOKEN
    shown = SHOWN_TOKENS // max(len(chosen), 1) if is_inline else SHOWN_TOKENS // 4
    views: dict[str, View] = {}
    payload: dict[str, Any] = {}
    for event in worst:
        view = View(document(event, run), Panel(event, run, budget // len(worst), shown))
        if view.panel.note:
            run.notes.append(view.panel.note)
        views[event.event_id], payload[event.event_id] = view, view.payload()
    in_order = [views[row.event_id] for row in chosen.rows if row.event_id in views]
    packed = {} if is_inline else {name: _packed(view, payload.pop(name)) for name, view in views.items()}
    health = judge(run.metrics)
    diagnosis = run.diagnoses[0] if run.runs and not chosen else None
    sparks: list[tuple] = []
    if diagnosis:
        health.is_surviving = bool(run.runs[0].overwritten)
        health.heed(diagnosis)
        run.notes += diagnosis.limits
        if explosion := diagnosis.worst:
            sparks = [(part, *drawings.spark(part, explosion.peak.step)) for part in aftermath(explosion)]
    return fill(
        "report.html",
        script_data.run_chart(run, health, diagnosis),
        {
            "labels": tokens.LABELS,
            "events": payload,
            "rows": [script_data.row(row) for row in chosen.rows] if len(chosen) > 1 else [],
            "show": run.show_command(""),
        },
        run=run,
        lead=views[worst[0].event_id] if worst else None,
        groups=run.groups if len(chosen) == len(run.events) else [],
        views=in_order if is_inline else [],
        packed=packed,
        num_events=len(chosen),
        facts=facts(run, diagnosis),
        health=health,
        diagnosis=diagnosis,
        sparks=sparks,
        courses=course_table(run.metrics),
        analyses=_analyses(run),
        show=run.show_command("ID"),
    )


class View(NamedTuple):
    """An event as the page shows it."""

    doc: EventDocument
    panel: Panel

    def payload(self) -> dict[str, Any]:
        """Return what the page's script needs of the event."""
        shades, sequences = self.panel.shades, enumerate(self.panel.sequences)
        return {"issue": issue(self.doc), "s": [tokens.payload(view, index, shades) for index, view in sequences]}


def _analyses(run: RunFolder) -> tuple[list[tuple[str, list[tuple[str, str]]]], int]:
    """Return the latest gradient analyses with their figures, and the number of others."""
    try:
        analyses, _ = read_analyses(run.path, run.runs)
    except ReportError:
        return [], 0
    from ..figures import buckets  # matplotlib takes a second to import, and few runs need it
    from ..figures.style import to_svg

    drawn, kinds = [], buckets.FIGURES.items()
    for analysis in list(reversed(analyses.values()))[:ANALYSES]:
        figures = [(title, to_svg(draw(analysis), f"b{analysis.step}-{name}", title)) for name, (title, draw) in kinds]
        rows = analysis.get("all", "sample_count")
        drawn.append((f"Step {analysis.step}: {len(analysis.buckets)} buckets of {rows:.0f} rows", figures))
    return drawn, len(analyses) - len(drawn)


def _packed(view: View, payload: dict[str, Any]) -> str:
    """Compress an event's article and tokens; the browser unpacks them with DecompressionStream."""
    html = _environment().get_template("event.html").module.event_article(view, True)
    document = json.dumps({"html": html, **payload}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = zlib.compress(printable(document).encode("utf-8"), 9)
    return base64.b64encode(packed).decode("ascii")


def facts(run: RunFolder, diagnosis: Diagnosis | None = None) -> list[tuple[str, str]]:
    """Return the numbers above the curve: of the events, or of a log's spikes."""
    made = [("events", number(len(run.events)))]
    if diagnosis is not None:
        made = [("spikes", number(len(diagnosis.explosions)))]
        if diagnosis.worst is not None and diagnosis.worst.peak.threshold:
            made.append(("threshold there", number(diagnosis.worst.peak.threshold, 3)))
    if run.events:
        rows = run.events.rows
        explained = sum(row.is_explained for row in rows)
        made.append(("explained", f"{number(explained)} of {number(len(run.events))}"))
        if causes := Counter(sorted(row.cause for row in rows if row.cause)):
            made.append(("commonest cause", spoken(causes.most_common(1)[0][0])))
        spent = sum(row.seconds for row in rows if row.seconds is not None)
        made.append(("spent searching", f"{number(spent, 3)} s"))
    if run.metrics:
        made.append(("steps", number(len(run.metrics.steps))))
        if norms := run.metrics.norms:
            made.append(("median norm", number(median(norms), 3)))
    return made


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gradloc.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters.update(
        (used.__name__, used)
        for used in (number, percent, visible, one_line, plural, spoken, in_unit, breakable, drawings.finite)
    )
    made.filters["svg"], made.filters["kind"] = Markup, lambda block: type(block).__name__
    made.globals.update(culprits_in_words=culprits_in_words, place_in_batch=place_in_batch, ranges=ranges)
    return made


def fill(template: str, chart: script_data.Chart | None = None, events: dict[str, Any] | None = None, **named) -> str:
    """Render a template that extends frame.html; ``named`` are its own variables.

    Its script reads the curve, and ``events``: labels of the tokens' numbers, the events, the rows of the list.
    """
    payload = {"labels": {}, "events": {}, "rows": [], "show": "", "charts": {"run": chart}} | (events or {})
    style = asset("uPlot.min.css") + "\n" + asset("report.css")
    style = style.replace("/* LIGHT */", variables(LIGHT)).replace("/* DARK */", variables(DARK))
    parts = "".join(asset(f"{name}.js") for name in SCRIPTS)
    library = f"/*\n{asset('uPlot.LICENSE')}*/\n{asset('uPlot.iife.min.js')}" if chart else ""
    script = f'"use strict";\n{library}{{\n{parts}}}\n'  # the block keeps its names from the window's
    policy = (
        "default-src 'none'; "
        f"style-src '{hash_of(style)}'; script-src '{hash_of(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    frame = {"policy": policy, "style": Markup(style), "script": Markup(script), "payload": escape_json(payload)}
    made = _environment().get_template(template).render(**frame, chart=chart, **named)
    return printable(made)


def breakable(line: str) -> Markup:
    """Allow a line break after each name of a config line."""
    return escape(line).replace(".", Markup(".<wbr>"))


def asset(name: str) -> str:
    return resources.files("gradloc.report").joinpath("assets", name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """Hash text as a security policy wants it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def escape_json(value: Any) -> Markup:
    """Write JSON that cannot end the script element around it.

    >>> escape_json({"t": "</script>"})
    Markup('{"t":"\\\\u003c/script\\\\u003e"}')
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
