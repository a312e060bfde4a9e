# SPDX-License-Identifier: Apache-2.0
"""Downloads one small file: https on every hop, a size cap, a deadline, a few retries."""

import email.utils
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..errors import DownloadError, IntegrityError, quoted

MAX_HOPS = 5
ATTEMPTS = 3
CONNECT_S, READ_S, DEADLINE_S = 5.0, 20.0, 60.0
MAX_WAIT_S = 20.0
_CHUNK, _SIP = 16 * 1024, 64
_TRANSIENT = (429, 500, 502, 503, 504)
_BY_HAND = "Download the file yourself and use --patch-file."


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
        what = f"downloads need the Python package requests, which is not installed here ({url})"
        next_ = "pip install requests   (or download the file yourself and use --patch-file)"
        raise DownloadError("net-no-requests", what, "Nothing else in this tool needs it.", next_) from error
    ends = time.monotonic() + deadline_s
    with requests.Session() as session:
        session.auth = lambda request: request  # else requests would look for passwords in ~/.netrc
        for attempt in range(1, ATTEMPTS + 1):
            try:
                data = _read(session, url, limit, ends)
                break
            except (OSError, HTTPError, _Transient) as error:
                if attempt == ATTEMPTS or time.monotonic() > ends:
                    what, cause = (
                        f"{url} could not be read, in {attempt} attempts",
                        "No network, a proxy or the server.",
                    )
                    raise DownloadError("net-failed", what, cause, _BY_HAND, found=_innermost(error)) from error
                wait_s = getattr(error, "wait_s", None) or float(attempt)
                sleep(min(wait_s, max(0.0, ends - time.monotonic())))
    if size is not None and len(data) != size:
        raise _wrong_size(url, f"{size} bytes", f"{len(data)} bytes")
    return data


class _Transient(Exception):
    """Worth another attempt, after ``wait_s`` seconds where the server says so."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


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


def _read(session: Any, url: str, limit: int, ends: float) -> bytes:
    at = url
    for _ in range(MAX_HOPS + 1):
        check_url(at, url)
        plain = {"Accept-Encoding": "identity"}
        timeout = (CONNECT_S, READ_S)
        with session.get(at, stream=True, allow_redirects=False, timeout=timeout, headers=plain) as response:
            if not response.is_redirect:
                return _body(response, url, limit, ends)
            at = urljoin(at, response.headers["location"])
    what = f"{url} redirects in circles or too often"
    raise DownloadError(
        "net-hops", what, "The server is set up wrongly.", _BY_HAND, expected=f"at most {MAX_HOPS} hops"
    )


def _body(response: Any, url: str, limit: int, ends: float) -> bytes:
    code, headers = f"HTTP {response.status_code}", response.headers
    if response.status_code in _TRANSIENT:
        raise _Transient(code, _retry_after(headers.get("retry-after")))
    if response.status_code != 200:
        what, cause = f"the server does not have {url}", "It is misspelt, moved or not public."
        raise DownloadError("net-status", what, cause, "Open it in a browser, or use --patch-file.", found=code)
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        what = f"the server compressed {url} although it was asked not to"
        raise DownloadError("net-encoding", what, "A proxy or the server.", _BY_HAND, found=encoding[:40])
    if headers.get("content-type", "").startswith("text/html"):
        what, cause = (
            f"the server sent a web page, not the patch: {url}",
            "A login page, or the one that shows the file.",
        )
        raise IntegrityError("net-html", what, cause, "Use the address of the raw file.")
    body = bytearray()
    # read1 returns what has arrived; read (in an old urllib3) waits for all it was asked for, so it is asked for
    # little: a server that drips must not outlast the deadline by much.
    read1 = getattr(response.raw, "read1", None)
    while chunk := read1(_CHUNK) if read1 else response.raw.read(_SIP):
        body += chunk
        if len(body) > limit:
            raise _wrong_size(url, f"at most {limit} bytes", "more")
        if time.monotonic() > ends:
            what, found = f"{url} takes too long", f"{len(body)} bytes so far"
            raise DownloadError("net-deadline", what, "A slow or a hostile server.", _BY_HAND, found=found)
    announced = headers.get("content-length", "")
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


def _innermost(error: BaseException) -> str:
    """The innermost cause, which says what happened without the library's nesting."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return str(error)[:200] or type(error).__name__
