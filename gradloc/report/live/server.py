# SPDX-License-Identifier: Apache-2.0
"""The page of a run that is going on, on 127.0.0.1 alone: ``gradloc-report watch RUN_DIR --serve``.

The report itself stays what it is, a file that can reach nothing. It is shown in a frame; the page around the frame
asks this server every other second whether the run has changed, and loads the report anew where the reader was.
"""

import json
import threading
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from markupsafe import escape

from ..pages import page
from .follow import Follower

ADDRESS = "127.0.0.1"
STYLE = "html,body,iframe{margin:0;width:100%;height:100%;border:0;display:block}p{font:16px system-ui;padding:2rem}"
SCRIPT = """\
"use strict";
const frame = document.querySelector("iframe");
let version = document.body.dataset.version;
async function look() {
  try {
    const found = String((await (await fetch("/version", { cache: "no-store" })).json()).version);
    document.title = document.title.replace(" (stopped)", "");
    if (found === version) return;
    version = found;
    const place = { left: frame.contentWindow.scrollX, top: frame.contentWindow.scrollY, behavior: "instant" };
    frame.addEventListener("load", () => frame.contentWindow.scrollTo(place), { once: true });
    frame.contentWindow.location.reload();
  } catch {
    if (!document.title.endsWith(" (stopped)")) document.title += " (stopped)";
  }
}
setInterval(look, 2000);
"""
POLICY = (
    f"default-src 'none'; style-src '{page.hash_of(STYLE)}'; script-src '{page.hash_of(SCRIPT)}'; connect-src 'self'; "
    "frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Site(ThreadingHTTPServer):
    """Serves one run, which somebody else polls. Whoever can open a connection on this machine can read it."""

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
        """The report of what was read last; made once for all who ask."""
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
        """The terminal belongs to the view."""
