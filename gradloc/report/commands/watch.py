# SPDX-License-Identifier: Apache-2.0
"""``gradloc watch RUN_DIR``: follows a run in the terminal, or serves its page on 127.0.0.1 alone (``--serve``).

The report itself stays what it is, a file that can reach nothing. It is shown in a frame; the page around the frame
asks this server every other second whether the run has changed, and loads the report anew where the reader was.
"""

import argparse
import contextlib
import json
import shlex
import sys
import threading
import time
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import escape
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...explain.numbers import bounded, number
from ...explain.story import headline
from ...explain.text import one_line
from .. import output
from ..errors import ReportError, sentence
from ..logs import files_of
from ..logs.recording import MEAN
from ..pages import exports, page, terminal
from ..pages.script_data import THRESHOLD
from ..pages.terminal import curve, event_table
from ..runs.health import STATES, RunHealth, judge
from ..runs.run import RunFolder, read_run
from ..runs.spikes import Judged
from . import add_log_arguments
from .health import MARKS

EVENTS = 8
"""Events listed: the last ones."""
PORT = 8321
DAY = 86_400.0


class Follower:
    """The current content of a run's folder."""

    def __init__(self, path: Path, *where: Any):
        """Follow ``path``; ``where`` are the further arguments of :func:`..runs.run.read_run`."""
        self.path = path
        self.version = 0
        """Counts how often something new was read."""
        self.run: RunFolder | None = None
        """The run; None until there is an event or a metric."""
        self.waiting = f"{path} is not there yet."
        """Sentence why there is nothing to show."""
        self._where = where
        self._seen: list[tuple[Path, int, int]] | None = None

    def poll(self) -> bool:
        """Reads the run if a file of it has changed; returns whether there is something new to show."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self.run = read_run(self.path, *self._where)
        except (ReportError, OSError) as error:  # an empty folder, or a file that just went away
            self.waiting = sentence(error) if isinstance(error, OSError) else str(error)
            return False
        self.version += 1
        return True

    def _stamps(self) -> list[tuple[Path, int, int]]:
        stamps = []
        for file in [*files_of(self.path, depth=3), self.path, *filter(None, self._where[:1])]:
            with contextlib.suppress(OSError):  # a file that just went away
                status = file.stat()
                stamps.append((file, status.st_size, status.st_mtime_ns))
        return stamps


def view(follower: Follower, width: int, is_live: bool = True) -> Group:
    """Lay out the last reading for a terminal of this many columns."""
    run = follower.run
    if run is None:
        return Group(Text(f"Waiting: {one_line(follower.waiting)}", style="dim"))
    health = judge(run.metrics)
    parts = [_head(run, health), *_curve(run, max(width - 12, 20))]
    for reason in health.verdicts[-1].reasons if health else ():  # what is wrong at the last step
        name = (reason.name.replace("_", " "), MARKS[reason.state][1])
        parts.append(Text.assemble(name, f": {reason.sentence}"))
    parts.append(Text())
    if run.events:
        parts.append(event_table(run.events.rows[-EVENTS:]))
        parts.append(Text(run.show_command(run.events.rows[-1].event_id), style="cyan"))
    elif run.runs:  # GradLoc may have been off: what the log says
        diagnosis = run.diagnoses[0]
        parts.append(Text(one_line(diagnosis.headline), style="bold red" if diagnosis.kind else "green"))
        if diagnosis.kind:
            parts.append(Text(f"What to do: gradloc {shlex.quote(str(run.path))}", style="cyan"))
    else:
        parts.append(Text("No spike so far.", style="green"))
    parts += [Text(one_line(note), style="yellow") for note in run.notes[-3:]]
    if is_live:
        parts.append(Text("Ctrl-C ends.", style="dim"))
    return Group(*parts)


def news(run: RunFolder, known: set[str]) -> list[str]:
    """Return a line for each event that is not in ``known``, and add them to it."""
    lines = []
    for at, row in enumerate(run.events.rows):
        if row.event_id not in known:
            known.add(row.event_id)
            event = run.events[at]
            after, _ = bounded(event.certificate.norm_after, event.certificate.error_bound, 3)
            lines.append(f"{headline(event)}: {number(event.trigger.grad_norm, 3)} → {after}")
    return lines


def _head(run: RunFolder, health: RunHealth) -> Text:
    line = Text(one_line(run.name), style="bold")
    norms, thresholds = run.metrics.logged(run.metrics.norm or MEAN), run.metrics.logged(THRESHOLD)
    threshold = thresholds[-1][1] if thresholds else run.events.rows[-1].threshold if run.events else None
    if run.metrics:
        norm = norms[-1][1] if norms else None
        line.append(f"  {run.metrics.unit} {run.metrics.steps[-1]:,}  norm {number(norm, 3)}", style="not bold")
    if threshold is not None:
        line.append(f"  threshold {number(threshold, 3)}", style="not bold")
    if health:
        state, mark = ("too short to judge" if health.is_too_short else health.state), health.state
        if not run.events and run.diagnoses[0].is_unrecovered:
            state, mark = run.diagnoses[0].label, STATES[-1]
        line.append("  ").append(state, style=MARKS[mark][1])
    return line


def _curve(run: RunFolder, width: int) -> list[Text]:
    """Plot the whole run, so that the steps which the text mentions are in the picture."""
    if run.runs and not run.events:
        return curve(run.diagnoses[0].judged, width, run.metrics)
    metrics, spiked = run.metrics, {row.step for row in run.events.rows}
    limits = dict(metrics.logged(THRESHOLD))
    norms = metrics.logged(metrics.norm or MEAN)
    return curve([[Judged(step, norm, limits.get(step), step in spiked) for step, norm in norms]], width, metrics)


ADDRESS = "127.0.0.1"
STYLE = "html,body,iframe{margin:0;width:100%;height:100%;border:0;display:block}p{font:16px system-ui;padding:2rem}"
SCRIPT = page.asset("live.js")
POLICY = (
    f"default-src 'none'; style-src '{page.hash_of(STYLE)}'; script-src '{page.hash_of(SCRIPT)}'; connect-src 'self'; "
    "frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Site(ThreadingHTTPServer):
    """Serves one run that another thread polls. Anyone who can connect to this machine's port can read it."""

    daemon_threads = True

    def __init__(self, follower: Follower, port: int):
        super().__init__((ADDRESS, port), _Handler)
        self.follower = follower
        self._lock = threading.Lock()
        self._made: tuple[int, bytes] = (-1, b"")

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def report(self) -> bytes:
        """Render the last reading, once for all requests."""
        with self._lock:
            version, run = self.follower.version, self.follower.run
            if run is None:
                why = escape(self.follower.waiting)
                return f'<!DOCTYPE html><meta charset="utf-8"><title>GradLoc</title><p>Waiting: {why}</p>'.encode()
            if self._made[0] != version:
                fresh = replace(run, notes=list(run.notes))  # rendering adds notes
                self._made = (version, page.render(fresh).encode("utf-8"))
            return self._made[1]


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        # a page elsewhere may point a name of its own at 127.0.0.1 and read along: it says so in Host
        host = self.headers.get("Host", "")
        if host not in {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This address is for this machine alone.\n")
        elif self.path == "/":
            body = (
                '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>GradLoc, live</title>'
                f'<style>{STYLE}</style><body data-version="{self.server.follower.version}">'
                f'<iframe src="/report.html" title="The report"></iframe><script>{SCRIPT}</script></body></html>'
            )
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", body.encode(), POLICY)
        elif self.path == "/version":
            body = json.dumps({"version": self.server.follower.version})
            self._send(HTTPStatus.OK, "application/json", body.encode())
        elif self.path == "/report.html":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.report(), "frame-ancestors 'self'")
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here but the report: go to /\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing, since the terminal shows the view."""


EPILOG = """\
examples:
  gradloc watch runs/demo-1                 norm, threshold, health and the last events, as they come
  gradloc watch runs/demo-1 --serve         the page, on http://127.0.0.1:8321/
  ssh -L 8321:127.0.0.1:8321 CLUSTER        then open it at home
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder or log; it need not be there yet")
    parser.add_argument(
        "--metrics", type=Path, metavar="PATH", help="the run's metrics, where they are not in its folder"
    )
    add_log_arguments(parser)
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="print the view once and end")
    parser.add_argument("--json", action="store_true", help="with --once: print the report's JSON")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1, for this machine alone")
    parser.add_argument("--port", type=int, help=f"for --serve; 0: any (default: {PORT})")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.interval <= DAY:
        raise ReportError(f"--interval must be more than 0 seconds and at most a day, found {args.interval:g}.")
    if str(args.run_dir) == "-":
        raise ReportError("watch follows a file or a folder, and - is standard input: gradloc - reports it at its end.")
    if args.port is not None and not args.serve:
        raise ReportError("--port goes with --serve.")
    if args.json and not args.once:
        raise ReportError("--json goes with --once: a view that goes on is no document.")
    if args.once and args.serve:
        raise ReportError("--once prints once and ends, --serve goes on: give one of them.")
    port = PORT if args.port is None else args.port
    if not 0 <= port < 1 << 16:
        raise ReportError(f"--port must be from 0 to 65535, found {port}.")
    follower, console = Follower(args.run_dir, args.metrics, args.metric, args.pattern), terminal.console()
    follower.poll()
    if args.once:
        if follower.run is None:
            raise ReportError(follower.waiting)
        if args.json:
            output.deliver(None, exports.to_json(follower.run, follower.run.events))
        else:
            console.print(view(follower, console.width, is_live=False))
        return 0
    if follower.run is None and (args.serve or not console.is_terminal):
        output.say(f"Waiting: {one_line(follower.waiting)}", sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        if args.serve:
            _serve(follower, args, port, console)
        elif console.is_terminal:
            _screen(follower, args.interval, console)
        else:
            _lines(follower, args.interval, console, set())
    return 0


def _screen(follower: Follower, interval: float, console: Console) -> None:
    with Live(view(follower, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            follower.poll()
            live.update(view(follower, console.width), refresh=True)


def _lines(follower: Follower, interval: float, console: Console, known: set[str]) -> None:
    while True:
        for line in news(follower.run, known) if follower.run else ():
            console.print(line, soft_wrap=True)
        time.sleep(interval)
        follower.poll()


def _serve(follower: Follower, args: argparse.Namespace, port: int, console: Console) -> None:
    try:
        site = Site(follower, port)
    except OSError as error:
        raise ReportError(f"port {port} cannot be opened ({error.strerror}): --port names another.") from None
    with site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        console.print(f"{site.url}  shows {args.run_dir} as it grows; Ctrl-C ends.", soft_wrap=True)
        known = {row.event_id for row in follower.run.events.rows} if follower.run else set()
        try:
            _lines(follower, args.interval, console, known)
        finally:
            site.shutdown()
