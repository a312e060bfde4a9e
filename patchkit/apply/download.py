# SPDX-License-Identifier: Apache-2.0
"""Downloads one small file: https on every hop, a size cap, a deadline, a few retries."""

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..errors import DownloadError, IntegrityError, quoted

MAX_HOPS = 5
ATTEMPTS = 3
READ_S, DEADLINE_S, MAX_WAIT_S = 20.0, 60.0, 20.0
_CHUNK = 16 * 1024
_TRANSIENT = (429, 500, 502, 503, 504)
_BY_HAND = "Download the file yourself and use --patch-file."


def fetch(url: str, limit: int, size: int | None = None) -> bytes:
    """Returns what ``url`` serves, in memory: at most ``limit`` bytes, of ``size`` where that is known.

    Raises:
        DownloadError: if the server cannot be reached or misbehaves.
        IntegrityError: if the size is not the expected one, or a web page came instead.
    """
    ends, data = time.monotonic() + DEADLINE_S, b""
    check_url(url, url)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            data = _read(url, limit, ends)
            break
        except (OSError, http.client.HTTPException, _Transient) as error:
            if attempt == ATTEMPTS or time.monotonic() > ends:
                what, cause = f"{url} could not be read, in {attempt} attempts", "No network, a proxy or the server."
                found = str(error)[:200] or type(error).__name__
                raise DownloadError("net-failed", what, cause, _BY_HAND, found=found) from error
            wait_s = getattr(error, "wait_s", None) or float(attempt)
            time.sleep(min(wait_s, max(0.0, ends - time.monotonic())))
    if size is not None and len(data) != size:
        raise _wrong_size(url, f"{size} bytes", f"{len(data)} bytes")
    return data


class _Transient(Exception):
    """Worth another attempt, after ``wait_s`` seconds where the server says so."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class _NoHops(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None  # each hop is looked at first


def _wrong_size(url: str, expected: str, found: str) -> IntegrityError:
    what, cause = f"{url} has not the size of the patch", "It is another file, or another version."
    return IntegrityError("net-size", what, cause, "Check the address.", expected=expected, found=found)


def check_url(url: str, start: str) -> None:
    """Raises DownloadError unless ``url``, to which ``start`` led, is https, with a host and without credentials."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        what = f"the address https://{parts.hostname}{parts.path} came with a user name or a password in it"
        raise DownloadError("net-userinfo", what, "Such addresses end in logs.", _BY_HAND)
    if parts.scheme != "https" or not parts.hostname:
        what, cause = f"only https is used, on every hop from {start}", "Anything else can be changed on the way."
        raise DownloadError("net-scheme", what, cause, _BY_HAND, found=url[:100])
    if parts.hostname == "github.com" and "blob" in parts.path.split("/")[3:4]:
        what, cause = f"{url} is the page that shows the file", "It was copied from the browser's address line."
        raise DownloadError("net-blob-page", what, cause, f"--patch-url {quoted(url.replace('/blob/', '/raw/', 1))}")


def _read(url: str, limit: int, ends: float) -> bytes:
    trusted = ssl.create_default_context(cafile=os.environ.get("REQUESTS_CA_BUNDLE"))
    opener = urllib.request.build_opener(_NoHops, urllib.request.HTTPSHandler(context=trusted))
    opener.addheaders = [("User-Agent", "gradloc-patch"), ("Accept-Encoding", "identity")]
    at = url
    for _ in range(MAX_HOPS + 1):
        check_url(at, url)
        try:
            with opener.open(at, timeout=READ_S) as response:
                return _body(response, url, limit, ends)
        except urllib.error.HTTPError as error:
            hop, found = error.headers.get("location"), f"HTTP {error.code}"
            if error.code in _TRANSIENT:
                asked = error.headers.get("retry-after", "")
                raise _Transient(found, min(float(asked), MAX_WAIT_S) if asked.isdigit() else None) from error
            if not hop or error.code not in (301, 302, 303, 307, 308):
                what, cause = f"the server does not have {url}", "It is misspelt, moved or not public."
                next_ = "Open it in a browser, or use --patch-file."
                raise DownloadError("net-status", what, cause, next_, found=found) from error
            at = urljoin(at, hop)
    what, expected = f"{url} redirects in circles or too often", f"at most {MAX_HOPS} hops"
    raise DownloadError("net-hops", what, "The server is set up wrongly.", _BY_HAND, expected=expected)


def _body(response: Any, url: str, limit: int, ends: float) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        what = f"the server compressed {url} although it was asked not to"
        raise DownloadError("net-encoding", what, "A proxy or the server.", _BY_HAND, found=encoding[:40])
    if response.headers.get("content-type", "").startswith("text/html"):
        what, cause = f"the server sent a web page, not the patch: {url}", "A login page, or one that shows the file."
        raise IntegrityError("net-html", what, cause, "Use the address of the raw file.")
    body = bytearray()
    while chunk := response.read1(_CHUNK):
        body += chunk
        if len(body) > limit:
            raise _wrong_size(url, f"at most {limit} bytes", "more")
        if time.monotonic() > ends:
            what, found = f"{url} takes too long", f"{len(body)} bytes so far"
            raise DownloadError("net-deadline", what, "A slow or a hostile server.", _BY_HAND, found=found)
    announced = response.headers.get("content-length", "")
    if announced.isdigit() and int(announced) != len(body):
        raise _Transient(f"{len(body)} of {announced} bytes arrived")
    return bytes(body)
