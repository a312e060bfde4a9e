# SPDX-License-Identifier: Apache-2.0
"""Gets a patch that a file or a URL names, and its sha256, which has to be right before the patch is read as one."""

import contextlib
import re
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from .language import MAX_BYTES, sha256_hex
from .refusal import INTEGRITY, NETWORK, USAGE, Refusal, quoted
from .tree import read_regular

TOTAL_S, SILENCE_S, MAX_HOPS, MAX_SUM_BYTES = 60.0, 20.0, 5, 2**16
PUBLISHED = "9bd7c21f7a95a5b993af36d15166b822dcc7ac0c3fa067d011c1cc61949ba925"  # the public GradLoc patch
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def fetch_patch(place: str, sum_place: str | None, digest: str | None, known: Collection[str]) -> bytes:
    """Return the patch at ``place``, a file or a URL, if its sha256 is ``digest``, or what ``sum_place`` says of it.

    Without either, the ``.sha256`` file next to a file serves, or that the sum is one of the ``known``, our own.
    """
    name = Path(unquote(urlsplit(place).path) if _is_url(place) else place).name
    if digest is None and sum_place is None and not _is_url(place) and Path(f"{place}.sha256").exists():
        sum_place = f"{place}.sha256"
    if digest is None and sum_place is not None:
        digest = _sum(_get(sum_place, MAX_SUM_BYTES), sum_place, name)
    if digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        what, cause = f"--sha256 {digest[:80]} is no sha256", "It has 64 hex digits."
        raise Refusal(USAGE, "sum-malformed", what, cause, f"sha256sum {quoted(name)}, where its author publishes it")
    data = None if digest is None and _is_url(place) else _get(place, MAX_BYTES)
    if data is None or (digest is None and sha256_hex(data) not in known):
        what = f"no sha256 was given for {place}, and without one it is not read"
        next_ = "--sha256-file F|URL or --sha256 HEX, from where the patch is published (its .sha256 file)"
        raise Refusal(INTEGRITY, "sum-missing", what, "A patch is code that will run.", next_)
    if digest is not None and sha256_hex(data) != digest.lower():
        cause = "It was changed, cut off, or is another version's."
        if data.lstrip()[:1] == b"<":
            cause = "It is a web page, not the patch; on GitHub, name the raw file."
        ids = {"expected": f"sha256 {digest.lower()}", "found": f"sha256 {sha256_hex(data)}, {len(data)} bytes"}
        next_ = "Get the patch and its sum again, from the same release."
        raise Refusal(INTEGRITY, "sum-mismatch", f"{place} is not what its sum says", cause, next_, **ids)
    if sha256_hex(data) == PUBLISHED:
        what, cause = f"{place} is the publicly released GradLoc patch", "With it every run stops at its first update."
        raise Refusal(INTEGRITY, "published", what, cause, "Leave --patch-file or --patch-url out: ours does the same.")
    return data


def _is_url(place: str) -> bool:
    return "://" in place


def _sum(data: bytes, place: str, name: str) -> str:
    """Return the sum of ``name`` in what ``sha256sum`` has printed, or a sum alone."""
    found = set()
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        entry = re.fullmatch(r"([0-9a-fA-F]{64})(?: [ *](?!/)(.+))?", line)
        if not entry or ".." in Path(entry[2] or "").parts:
            what, cause = f"line {number} of {place} is no line of a sum file", "It is another file, or was edited."
            raise Refusal(INTEGRITY, "sum-malformed", what, cause, "sha256sum FILE > FILE.sha256", found=line[:80])
        if not entry[2] or Path(entry[2]).name == name:
            found.add(entry[1].lower())
    if len(found) != 1:
        what, cause = f"{place} has {len(found)} sums of {name}", "It is the sum file of another patch, or is empty."
        raise Refusal(INTEGRITY, "sum-other", what, cause, f"Name the sum file of {name}, or give --sha256 HEX.")
    return found.pop()


def _get(place: str, limit: int) -> bytes:
    if _is_url(place):
        return download(place, limit)
    try:
        return read_regular(Path(place), limit)
    except OSError as error:
        what, cause = f"{place} cannot be read", f"It is misspelt, no plain file, or has over {limit} bytes."
        raise Refusal(INTEGRITY, "file-unreadable", what, cause, f"ls -l {quoted(place)}", found=str(error)) from error


def download(url: str, limit: int) -> bytes:
    """Return what a server sends by https, or http from loopback: at most ``limit`` bytes in ``TOTAL_S`` seconds."""
    try:
        import requests
    except ImportError as error:
        what, cause = f"{url} needs the package requests", "This Python has none; all else works without."
        next_ = "pip install requests, or download it by hand and name it with --patch-file"
        raise Refusal(NETWORK, "no-requests", what, cause, next_) from error
    began, hop, answer, data = time.monotonic(), url, None, b""
    with requests.Session() as session, contextlib.ExitStack() as stack:
        session.auth = lambda request: request  # else it takes a password from .netrc
        try:
            stack.enter_context(_deadline(TOTAL_S))
            for _ in range(MAX_HOPS + 1):
                _check_url(hop, hop != url or answer is not None)
                plain = {"Accept-Encoding": "identity"}
                answer = session.get(hop, headers=plain, stream=True, allow_redirects=False, timeout=SILENCE_S)
                if not answer.is_redirect:
                    break
                hop = urljoin(hop, answer.headers["location"])
            else:
                raise _spoilt(url, f"is a loop of over {MAX_HOPS} redirects")
            if answer.status_code != 200:
                what, cause = (
                    f"the server has no {hop}: it says {answer.status_code}",
                    "The URL is misspelt or private.",
                )
                raise Refusal(NETWORK, "no-answer", what, cause, "Open it in a browser; name the raw file.")
            encoding, length = (answer.headers.get(f"content-{one}", "") for one in ("encoding", "length"))
            if encoding not in ("", "identity"):
                raise _spoilt(url, f"has the encoding {encoding[:20]!r}, which was not asked for")
            for chunk in answer.iter_content(2**14) if not length.isdigit() or int(length) <= limit else [b""]:
                data += chunk
                if not chunk or len(data) > limit:
                    raise _spoilt(url, f"has over {limit} bytes")
        except (requests.RequestException, OSError, ValueError) as error:
            if time.monotonic() - began >= TOTAL_S:
                raise _spoilt(url, f"takes over {TOTAL_S:g} s") from error
            if answer is not None:
                raise _spoilt(url, "was cut off", str(error)[:200]) from error
            what, cause = f"{url} does not answer", "No network, no such server, or its certificate is not right."
            raise Refusal(
                NETWORK, "no-answer", what, cause, f"curl -I {quoted(url)}", found=str(error)[:200]
            ) from error
    return data


def _check_url(url: str, is_redirect: bool) -> None:
    parts = urlsplit(url)
    is_local = not is_redirect and parts.scheme == "http" and parts.hostname in _LOOPBACK
    if (parts.scheme == "https" or is_local) and parts.hostname and "@" not in parts.netloc:
        return
    if is_redirect:
        raise _spoilt(url, "is where a redirect leads, and no plain https")
    what, cause = f"{url} is not taken", "A patch comes by https, without a name or password in the URL."
    raise Refusal(USAGE, "url-refused", what, cause, "--patch-url https://...")


def _spoilt(url: str, what: str, found: str | None = None) -> Refusal:
    cause, next_ = "The server or a proxy is not what it should be; nothing was changed.", f"curl -IL {quoted(url)}"
    return Refusal(INTEGRITY, "answer-spoilt", f"the answer of {url} {what}", cause, next_, found=found)


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer, whatever it waits for: a server may send a byte now and then."""

    def ring(*arguments: Any) -> None:
        raise TimeoutError("too slow")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
