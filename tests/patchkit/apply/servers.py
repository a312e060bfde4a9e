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


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``/<behaviour>/<name>``; each behaviour is one of the methods below."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        behaviour = self.path.split("/")[1].replace("-", "_")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            getattr(self, behaviour)(self.server.content)

    def say(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | named).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def plain(self, content: bytes) -> None:
        self.say(200, content)

    def sums(self, content: bytes) -> None:
        self.say(200, self.server.sums)

    def chunked(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(content), 100):
            piece = content[start : start + 100]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def cut_chunk(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"400\r\n" + content[:100])
        self.close_connection = True

    def hop(self, content: bytes) -> None:
        self.say(302, Location="/plain/gradloc.patch")

    def loop(self, content: bytes) -> None:
        self.say(302, Location=self.path)

    def to_http(self, content: bytes) -> None:
        self.say(302, Location="http://localhost:9/gradloc.patch")

    def to_file(self, content: bytes) -> None:
        self.say(302, Location="file:///etc/passwd")

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
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content[:-50])
        self.close_connection = True

    def drip(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for byte in content:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.05)

    def bomb(self, content: bytes) -> None:
        self.say(200, gzip.compress(b"0" * 10**7), Content_Encoding="gzip")

    def larger(self, content: bytes) -> None:
        self.say(200, content + b"more\n")

    def endless(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
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
