# SPDX-License-Identifier: Apache-2.0
"""Fetch a patch, verify its sha256, parse git's format, and apply it at its exact lines."""

import contextlib
import errno
import hashlib
import os
import re
import signal
import stat
import time
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from .refusal import Refusal

MAX_BYTES, MAX_SUM_BYTES, MAX_FILE_BYTES = 2**20, 2**16, 2**24
TOTAL_S, SILENCE_S, MAX_HOPS = 60.0, 20.0, 5  # of a download
PUBLISHED = "9bd7c21f7a95a5b993af36d15166b822dcc7ac0c3fa067d011c1cc61949ba925"  # the public GradLoc patch
VERSION_FILE = "verl/version/version"  # says which verl it is; a run locks it, so no patch may replace it
_HEAD = re.compile(
    r"diff --git a/(?P<path>\S+) b/(?P=path)\n(?P<new>new file mode 100644\n)?"
    r"(?:index (?P<before>[0-9a-f]{7,40})\.\.(?P<after>[0-9a-f]{7,40})(?: 100644)?\n)?"
    r"--- (?P<old>a/(?P=path)|/dev/null)\n\+\+\+ b/(?P=path)\n(?=@@ )"
)
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\n")
_PATH = re.compile(r"verl/[A-Za-z0-9_./-]{1,195}\Z")
_ODD = re.compile(r"(|\.|\.\.|git~\d+|\.git.*|.*\.|(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?)\Z", re.IGNORECASE)


class Hunk(NamedTuple):
    """A change of neighbouring lines: their number, from 0, and content before, and both after."""

    start: int
    old: list[str]
    new_start: int
    new: list[str]

    def inverse(self) -> "Hunk":
        """Return the hunk that undoes this one."""
        return Hunk(self.new_start, self.new, self.start, self.old)


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """Return git's id for ``data`` as a file's content, as ``git hash-object`` prints it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def hidden_character(text: str) -> str | None:
    """Return the first control or format character of ``text`` as ``U+XXXX`` (CVE-2021-42574), else None."""
    found = (char for char in text if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"))
    return next((f"U+{ord(char):04X}" for char in found), None)


def is_safe(path: str) -> bool:
    """Return whether a path is below ``verl/``, and means the same file on every disk."""
    return bool(_PATH.match(path)) and not any(map(_ODD.match, path.split("/"))) and path != VERSION_FILE


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a plain file of at most ``limit`` bytes; OSError for a link, a pipe, a larger one."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise OSError(errno.EINVAL, f"not a plain file of at most {limit} bytes", str(path))
        return stream.read()


@dataclass(frozen=True)
class FilePatch:
    """One file's section: path, blob ids or their prefixes before (None: a new file) and after, hunks."""

    path: str
    before: str | None
    after: str
    hunks: tuple[Hunk, ...]

    def forward(self, base: bytes | None) -> bytes:
        """Return the result on ``base``, which is None for a new file, checked by its id."""
        if (base is None) != (self.before is None):
            raise Refusal("result-missing", path=self.path)
        return self._checked(self.after, apply_hunks(self.path, self.hunks, base or b""))

    def backward(self, result: bytes) -> bytes | None:
        """Return the base, None for a new file, that ``result`` was made from, checked by its id."""
        inverse = tuple(hunk.inverse() for hunk in self.hunks)
        base = apply_hunks(self.path, inverse, self._checked(self.after, result))
        return self._checked(blob_id(b"") if self.before is None else self.before, base) or None

    def sides(self, there: bytes | None, *known: bytes | None) -> tuple[bytes | None, bytes] | None:
        """Return the contents before (the one that is ``known``) and after, if ``there`` is one and not both."""
        found = [(before, self.forward(before)) for before in known]
        if known:
            return found[0] if there in found[0] else None
        with contextlib.suppress(Refusal):
            found.append((there, self.forward(there)))
        with contextlib.suppress(Refusal):
            found += [] if there is None else [(self.backward(there), there)]
        return found[0] if len(found) == 1 else None

    def _checked(self, expected: str, data: bytes) -> bytes:
        if not (found := blob_id(data)).startswith(expected):
            ids = {"expected": f"git blob {expected[:12]}", "found": f"git blob {found[:12]}"}
            raise Refusal("result-digest", path=self.path, **ids)
        return data


def parse(data: bytes) -> dict[str, FilePatch]:
    """Return the sections of the patch ``data`` by path."""
    files: dict[str, FilePatch] = {}
    preamble, *sections = re.split(r"(?m)^(?=diff --git )", data.decode("utf-8", "surrogateescape"))
    if re.search(r"diff --git |^(@@|---|\+\+\+) ", preamble, re.MULTILINE) or not sections:
        raise Refusal("patch-empty")
    for section in sections:
        if not (head := _HEAD.match(section)) or not is_safe(head["path"]):
            raise Refusal("patch-section", line=section.splitlines()[0][:90])
        path, before = head["path"], head["before"] or ""
        if len({bool(head["new"]), head["old"] == "/dev/null", *([not before.strip("0")] if before else [])}) != 1:
            raise Refusal("patch-new", path=path)
        pairs = [(f"{old}/".casefold(), f"{path}/".casefold()) for old in files]
        if any(a.startswith(b) or b.startswith(a) for a, b in pairs):
            raise Refusal("patch-twice", path=path)
        hunks = tuple(_hunk(path, text) for text in re.split(r"(?m)^(?=@@ )", section[head.end() :])[1:])
        files[path] = FilePatch(path, None if head["new"] else before, head["after"] or "", hunks)
    return files


def _hunk(path: str, text: str) -> Hunk:
    head, lines = _HUNK.match(text), split(text)[1:]
    old, new = ([line[1:] for line in lines if line[0] in marks] for marks in (" -", " +"))
    counts = [1 if count is None else int(count) for count in (head[2], head[4])] if head else []
    if not head or counts != [len(old), len(new)] or any(line[0] not in " +-" or line[-1] != "\n" for line in lines):
        raise Refusal("patch-hunk", path=path)
    if hidden := hidden_character("".join(line for line in lines if line[0] == "+")):
        raise Refusal("patch-hidden", path=path, hidden=hidden)
    if not old and head[1] != "0":
        raise Refusal("patch-context", path=path)
    # An empty side is written with the line BEFORE it.
    return Hunk(int(head[1]) - bool(old), old, int(head[3]) - bool(new), new)


def split(text: str) -> list[str]:
    """Return the lines with their ends. Not splitlines(): a form feed or a lone CR ends no line of a patch."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def apply_hunks(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    """Return ``data`` with ``hunks`` applied where they say; refuse one that does not fit, and show both sides."""
    lines, done, at = split(data.decode("utf-8", "surrogateescape")), list[str](), 0
    for number, (start, old, new_start, new) in enumerate(hunks, start=1):
        there = lines[start : start + len(old)]
        done += [*lines[at:start], *new]
        if start < at or there != old or len(done) != new_start + len(new):
            first = next((i for i, (a, b) in enumerate(zip(there, old, strict=False)) if a != b), len(there))
            shown = [f"expects | {line.rstrip()}" for line in old[first : first + 6] or ["(the file's end)"]]
            shown += [f"has     | {line.rstrip()}" for line in there[first : first + 6] or ["(the file's end)"]]
            raise Refusal("hunk-mismatch", number=number, path=path, at=start + first + 1, lines=shown)
        at = start + len(old)
    return "".join(done + lines[at:]).encode("utf-8", "surrogateescape")


def fetch_patch(place: str, sum_place: str | None, digest: str | None, known: Collection[str]) -> bytes:
    """Return the patch at ``place``, a file or a URL, if its sha256 is ``digest``, or what ``sum_place`` says of it.

    Without either, the ``.sha256`` file next to a file serves, or that the sum is one of the ``known``, our own.
    """
    is_url = "://" in place
    name = Path(unquote(urlsplit(place).path) if is_url else place).name
    if sum_place is None and not is_url and os.path.exists(f"{place}.sha256"):
        sum_place = f"{place}.sha256"
    if digest is None and sum_place is not None:
        digest = _sum(_get(sum_place, MAX_SUM_BYTES), sum_place, name)
    if digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise Refusal("sum-hex", digest=digest)
    data = b"" if digest is None and is_url else _get(place, MAX_BYTES)
    found = sha256_hex(data)
    if digest is None and found not in known:
        raise Refusal("sum-missing", place=place)
    if digest is not None and found != digest.lower():
        reason = "sum-web-page" if data.lstrip()[:1] == b"<" else "sum-mismatch"
        raise Refusal(reason, place=place, expected=digest.lower(), found=found)
    if found == PUBLISHED:
        raise Refusal("published", place=place)
    return data


def _sum(data: bytes, place: str, name: str) -> str:
    """Return the sum of ``name`` in what ``sha256sum`` has printed, or a sum alone."""
    found = set[str]()
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        entry = re.fullmatch(r"([0-9a-fA-F]{64})(?: [ *](?!/)(.+))?", line)
        if not entry or ".." in Path(entry[2] or "").parts:
            raise Refusal("sum-line", number=number, place=place, found=line[:80])
        found |= {entry[1].lower()} if Path(entry[2] or name).name == name else set()
    if len(found) != 1:
        raise Refusal("sum-other", place=place, n=len(found), name=name)
    return found.pop()


def _get(place: str, limit: int) -> bytes:
    try:
        return download(place, limit) if "://" in place else read_regular(Path(place), limit)
    except OSError as error:
        raise Refusal("unreadable", place=Path(place), limit=limit, found=str(error)) from error


def _ring(*_: Any) -> None:
    raise TimeoutError("too slow")


def download(url: str, limit: int) -> bytes:
    """Return what a server sends by https, or http from loopback: at most ``limit`` bytes in ``TOTAL_S`` seconds."""
    try:
        import requests
    except ImportError as error:
        raise Refusal("no-requests", url=url) from error
    began, hop, answer, data = time.monotonic(), url, None, b""
    signal.signal(signal.SIGALRM, _ring)  # a read's own limit is between bytes, and a server may send one now and then
    signal.setitimer(signal.ITIMER_REAL, TOTAL_S, 1.0)
    try:
        session = requests.Session()
        session.auth = lambda request: request  # else it takes a password from .netrc
        for _ in range(MAX_HOPS + 1):
            parts, is_first = urlsplit(hop), answer is None
            is_local = is_first and parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
            if not (parts.scheme == "https" or is_local) or not parts.hostname or "@" in parts.netloc:
                raise Refusal("url-refused" if is_first else "redirect-refused", url=hop)
            plain = {"Accept-Encoding": "identity"}
            answer = session.get(hop, headers=plain, stream=True, allow_redirects=False, timeout=SILENCE_S)
            if not answer.is_redirect:
                break
            hop = urljoin(hop, answer.headers["location"])
        else:
            raise Refusal("answer-loop", url=url, hops=MAX_HOPS)
        if answer.status_code != 200:
            raise Refusal("answer-status", url=hop, status=answer.status_code)
        encoding, length = (answer.headers.get(f"content-{one}", "0") for one in ("encoding", "length"))
        if encoding not in ("0", "identity"):
            raise Refusal("answer-encoded", url=url, encoding=encoding[:20])
        is_long = int(length) > limit
        for chunk in () if is_long else answer.iter_content(2**14):
            data += chunk
            if is_long := len(data) > limit:
                break
        if is_long:
            raise Refusal("answer-long", url=url, limit=limit)
    except (requests.RequestException, OSError, ValueError) as error:
        reason = "answer-cut" if answer is not None else "no-answer"
        reason = "answer-late" if time.monotonic() - began >= TOTAL_S else reason
        raise Refusal(reason, url=url, limit=TOTAL_S, found=str(error)[:200]) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return data
