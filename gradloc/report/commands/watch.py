# SPDX-License-Identifier: Apache-2.0
"""``gradloc-report watch RUN_DIR``: follows a run in the terminal, or serves its page on this machine."""

import argparse
import contextlib
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from ..errors import ReportError
from ..live.follow import Follower, news, view
from ..pages import terminal

EPILOG = """\
examples:
  gradloc-report watch runs/demo-1                 norm, threshold, health and the last events, as they come
  gradloc-report watch runs/demo-1 --serve         the page, on http://127.0.0.1:8321/
  ssh -L 8321:127.0.0.1:8321 CLUSTER               then open it at home
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder or log; it need not be there yet")
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="the run's metrics, when they lie elsewhere")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="print the view once and end")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1, for this machine alone")
    parser.add_argument("--port", type=int, default=8321, help="for --serve; 0: any (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if not args.interval > 0:
        raise ReportError(f"--interval must be more than 0 seconds, found {args.interval}.")
    if not 0 <= args.port < 1 << 16:
        raise ReportError(f"--port must be from 0 to 65535, found {args.port}.")
    follower, console = Follower(args.run_dir, args.metrics), terminal.console()
    follower.poll()
    if args.once:
        if follower.run is None:
            raise ReportError(follower.waiting)
        console.print(view(follower, console.width))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        if args.serve:
            _serve(follower, args, console)
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


def _serve(follower: Follower, args: argparse.Namespace, console: Console) -> None:
    from ..live.server import Site

    try:
        site = Site(follower, args.port)
    except OSError as error:
        raise ReportError(f"port {args.port} cannot be opened ({error.strerror}): --port names another.") from None
    with site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        console.print(f"{site.url}  shows {args.run_dir} as it grows; Ctrl-C ends.", soft_wrap=True)
        known = {event.event_id for event in follower.run.events} if follower.run else set()
        try:
            _lines(follower, args.interval, console, known)
        finally:
            site.shutdown()
