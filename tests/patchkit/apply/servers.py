# SPDX-License-Identifier: Apache-2.0
"""An https server on this machine that behaves as badly as a test wants."""

import contextlib
import gzip
import http.server
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import trustme

HOPS = {
    "hop": "/plain/gradloc.patch",
    "loop": "/loop/gradloc.patch",
    "to_http": "http://localhost:9/gradloc.patch",
    "to_file": "file:///etc/passwd",
}
"""Behaviours that lead elsewhere."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``/<behaviour>/<name>``; each behaviour is one of the methods below."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        behaviour = self.path.split("/")[1].replace("-", "_")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            if behaviour in HOPS:
                self.say(302, Location=HOPS[behaviour])
            else:
                getattr(self, behaviour)(self.server.content)

    def say(self, code: int, body: bytes = b"", **headers: str | None) -> None:
        self.send_response(code)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def plain(self, content: bytes) -> None:
        self.say(200, content)

    def sums(self, content: bytes) -> None:
        self.say(200, self.server.sums)

    def chunked(self, content: bytes) -> None:
        pieces = [content[start : start + 100] for start in range(0, len(content), 100)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        self.say(200, body + b"0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")

    def cut_chunk(self, content: bytes) -> None:
        self.say(200, b"400\r\n" + content[:100], Content_Length=None, Transfer_Encoding="chunked")
        self.close_connection = True

    def busy(self, content: bytes) -> None:
        self.say(503)

    def busy_once(self, content: bytes) -> None:
        if len(self.server.requests) == 1:
            self.say(429, Retry_After="1")
        else:
            self.say(200, content)

    def short(self, content: bytes) -> None:
        self.say(200, content[:-50], Content_Length=str(len(content)))
        self.close_connection = True

    def short_once(self, content: bytes) -> None:
        self.plain(content) if len(self.server.requests) > 1 else self.short(content)

    def until_close(self, content: bytes) -> None:
        self.say(200, content[:-50], Content_Length=None, Connection="close")
        self.close_connection = True

    def drip(self, content: bytes) -> None:
        self.say(200, Content_Length=str(len(content)))
        for byte in content:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.05)

    def bomb(self, content: bytes) -> None:
        self.say(200, gzip.compress(b"0" * 10**7), Content_Encoding="gzip")

    def larger(self, content: bytes) -> None:
        self.say(200, content + b"more\n")

    def endless(self, content: bytes) -> None:
        self.say(200, Content_Length=None)
        while True:
            self.wfile.write(b"0" * 65536)

    def other(self, content: bytes) -> None:
        self.say(200, content.replace(b"hook()", b"hack()"))

    def page(self, content: bytes) -> None:
        self.say(200, b"<html>log in</html>", Content_Type="text/html; charset=utf-8")

    def missing(self, content: bytes) -> None:
        self.say(404, b"<html>404</html>", Content_Type="text/html")


@contextlib.contextmanager
def serving(folder: Path, content: bytes, sums: bytes) -> Iterator[http.server.HTTPServer]:
    """Serves ``content`` over https on a free port; ``folder`` gets the authority's ca.pem."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.content, server.sums, server.requests = content, sums, []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *arguments: None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
