# SPDX-License-Identifier: Apache-2.0
"""Downloads one small file: https on every hop, a size cap, a deadline, a few retries."""

import email.utils
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..errors import DownloadError, IntegrityError

MAX_HOPS = 5
ATTEMPTS = 3
CONNECT_S, READ_S, DEADLINE_S = 5.0, 20.0, 60.0
MAX_WAIT_S = 20.0
_CHUNK, _SIP = 16 * 1024, 64
_TRANSIENT = (429, 500, 502, 503, 504)


def is_url(text: str) -> bool:
    """True if ``text`` names a scheme, whether one that is allowed or not."""
    return "://" in text


def fetch(
    url: str,
    limit: int,
    size: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    deadline_s: float = DEADLINE_S,
) -> bytes:
    """Returns what ``url`` serves, in memory: nothing is written to a disk.

    Args:
        url: an https address without a user name in it.
        limit: the most bytes to read.
        size: the number of bytes it must have, where that is known.
        sleep: how to wait between attempts.
        deadline_s: seconds for everything together.

    Raises:
        DownloadError: if the server cannot be reached or misbehaves.
        IntegrityError: if the size is not the expected one, or a web page came instead.
    """
    try:
        import requests
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise DownloadError("net-no-requests", url=url) from error
    ends = time.monotonic() + deadline_s
    with requests.Session() as session:
        session.auth = _no_auth  # else requests would look for passwords in ~/.netrc
        for attempt in range(1, ATTEMPTS + 1):
            try:
                data = _read(session, url, limit, ends)
                break
            except (OSError, HTTPError, _Transient) as error:
                if attempt == ATTEMPTS or time.monotonic() > ends:
                    raise DownloadError("net-failed", url=url, attempts=attempt, found=_reason(error)) from error
                wait_s = getattr(error, "wait_s", None) or float(attempt)
                sleep(min(wait_s, max(0.0, ends - time.monotonic())))
    if size is not None and len(data) != size:
        raise IntegrityError("net-size", url=url, expected=f"{size} bytes", found=f"{len(data)} bytes")
    return data


class _Transient(Exception):
    """Worth another attempt, after ``wait_s`` seconds where the server says so."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


def _no_auth(request: Any) -> Any:
    return request


def check_url(url: str, hop: str | None = None) -> None:
    """Raises DownloadError unless ``url`` is https, with a host and without credentials."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise DownloadError("net-scheme", url=hop or url, found=f"{parts.scheme}: in {url[:100]}")
    if parts.username or parts.password:
        raise DownloadError("net-userinfo", url=f"https://{parts.hostname}{parts.path}")
    if not parts.hostname:
        raise DownloadError("net-scheme", url=hop or url, found="no host")
    pieces = parts.path.split("/")
    if parts.hostname == "github.com" and "blob" in pieces[3:4]:
        raise DownloadError("net-blob-page", url=url, raw=url.replace("/blob/", "/raw/", 1))


def _read(session: Any, url: str, limit: int, ends: float) -> bytes:
    at = url
    for _ in range(MAX_HOPS + 1):
        check_url(at, hop=url)
        response = session.get(
            at,
            stream=True,
            allow_redirects=False,
            timeout=(CONNECT_S, READ_S),
            headers={"Accept-Encoding": "identity"},
        )
        with response:
            if response.is_redirect:
                at = urljoin(at, response.headers["location"])
                continue
            return _body(response, url, limit, ends)
    raise DownloadError("net-hops", url=url, expected=f"at most {MAX_HOPS} redirects")


def _body(response: Any, url: str, limit: int, ends: float) -> bytes:
    if response.status_code in _TRANSIENT:
        wait_s = _retry_after(response.headers.get("retry-after"))
        raise _Transient(f"HTTP {response.status_code}", wait_s)
    if response.status_code != 200:
        raise DownloadError("net-status", url=url, found=f"HTTP {response.status_code}")
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise DownloadError("net-encoding", url=url, found=encoding[:40])
    if response.headers.get("content-type", "").startswith("text/html"):
        raise IntegrityError("net-html", url=url, found="Content-Type: text/html")
    body = bytearray()
    # read1 returns what has arrived; read (in an old urllib3) waits for all it was asked for, so
    # it is asked for little: a server that drips must not outlast the deadline by much.
    read1 = getattr(response.raw, "read1", None)
    while chunk := read1(_CHUNK) if read1 else response.raw.read(_SIP):
        body += chunk
        if len(body) > limit:
            raise IntegrityError("net-size", url=url, expected=f"at most {limit} bytes", found="more")
        if time.monotonic() > ends:
            raise DownloadError("net-deadline", url=url, found=f"{len(body)} bytes so far")
    announced = response.headers.get("content-length", "")
    if announced.isdigit() and int(announced) != len(body):
        raise _Transient(f"{len(body)} of {announced} bytes arrived")
    return bytes(body)


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait, from either form of the header; at most MAX_WAIT_S."""
    if not text:
        return None
    if text.isdigit():
        return min(float(text), MAX_WAIT_S)
    when = email.utils.parsedate_tz(text)
    return min(max(0.0, email.utils.mktime_tz(when) - time.time()), MAX_WAIT_S) if when else None


def _reason(error: Exception) -> str:
    """The innermost cause, which says what happened without the library's nesting."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__
    return str(error)[:200] or type(error).__name__
