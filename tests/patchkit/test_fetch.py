# SPDX-License-Identifier: Apache-2.0
"""A patch from elsewhere is taken if its sum is right and it is a patch like ours; else nothing is changed."""

import gzip
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from patchkit import patch as fetch
from patchkit.patch import sha256_hex
from tests.patchkit.world import ACTOR, BASE, FOREIGN, RESULT, files_of, foreign_patch, put, unchanged

PATCH = foreign_patch()
SUM = f"{sha256_hex(PATCH)}  theirs.patch\n"


class Server(BaseHTTPRequestHandler):
    """Answers as the first part of the path says."""

    def do_GET(self):
        kind, data, headers = self.path.split("/")[1], PATCH, {}
        if self.path.endswith(".sha256"):
            data = {"other": SUM.replace("theirs", "ours"), "wrong": "0" * 64}.get(kind, SUM).encode()
        elif kind == "gzip":
            data, headers = gzip.compress(PATCH), {"Content-Encoding": "gzip"}
        elif kind == "page":
            data = b"<!doctype html>"
        goal = {"http": "/right/theirs.patch", "loop": self.path, "file": "file:///etc/passwd"}.get(kind)
        self.send_response(302 if goal else 404 if kind == "absent" else 200)
        headers |= {"Location": goal} if goal else {}
        lengths = {"huge": 2 * 2**30, "cut": len(data) + 9, "short": len(data) - 9, "endless": None}
        if (length := lengths.get(kind, len(data))) is not None:
            headers["Content-Length"] = str(length)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            for part in [data[i : i + 1] for i in range(99)] if kind == "drip" else [data * 2**14] * 99:
                self.wfile.write(part if kind in ("drip", "endless") else data)
                if kind not in ("drip", "endless"):
                    return
                time.sleep(0.05 if kind == "drip" else 0)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url(monkeypatch):
    """A server on loopback."""
    monkeypatch.setenv("NO_PROXY", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("ids", [0, 10, 40])
@pytest.mark.parametrize("sum_", ["url", "file", "hex", "next to it"])
def test_with_the_right_sum_it_is_put_on_and_taken_off_to_the_byte(apply, tree, tmp_path, url, sum_, ids):
    patch = PATCH if "url" in sum_ else foreign_patch(ids)
    put(tmp_path / "a folder", {"theirs.patch": patch})
    put(tmp_path, {"sum": f"{sha256_hex(patch)} *theirs.patch\n"})
    place = ["--patch-file", tmp_path / "a folder/theirs.patch"]
    options = {
        "url": ["--patch-url", f"{url}/right/theirs.patch", "--sha256-file", f"{url}/right/theirs.patch.sha256"],
        "file": [*place, "--sha256-file", tmp_path / "sum"],
        "hex": [*place, "--sha256", sha256_hex(patch).upper()],
        "next to it": place,
    }[sum_]
    if sum_ == "next to it":
        put(tmp_path / "a folder", {"theirs.patch.sha256": sha256_hex(patch)})
    with unchanged(tree):
        apply(tree, *options, "--check").expect(0, "would apply: 2 files")
    apply(tree, *options).expect(0, "applied: 2 files")
    assert files_of(tree) == BASE | FOREIGN
    with unchanged(tree):
        apply(tree, *options).expect(0, "nothing to apply")
        apply(tree).expect(1, "OTHER_VERSION: another patch (sha256", "--reverse")
        apply(tree, "--status").expect(0, "APPLIED", sha256_hex(patch)[:12])
    put(tree, {ACTOR: f"{FOREIGN[ACTOR]}mine\n"})
    apply(tree, "--reverse").expect(1, "edited after it was applied")
    put(tree, {ACTOR: FOREIGN[ACTOR]})
    apply(tree, "--reverse").expect(0, "taken off: 2 files")
    assert files_of(tree) == BASE and not (tree / ".gradloc-patch").exists()
    apply(tree).expect(0)
    apply(tree, *options).expect(1)
    assert files_of(tree) == RESULT


SPOILT = {
    "cut": (3, "was cut off"), "short": (3, "is not what its sum says"), "gzip": (3, "has the encoding 'gzip'"),
    "http": (3, "no plain https"), "file": (3, "no plain https"), "loop": (3, "a loop of over 5 redirects"),
    "drip": (3, "takes over 0.5 s"), "huge": (3, "has over"), "endless": (3, "has over"), "page": (3, "a web page"),
    "absent": (7, "says 404"), "wrong": (3, "is not what its sum says"), "other": (3, "0 sums of theirs.patch"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
def test_a_server_s_bad_answer_is_named_and_nothing_is_changed(apply, tree, url, kind, monkeypatch):
    monkeypatch.setattr(fetch, "TOTAL_S", 0.5 if kind == "drip" else 20.0)
    if kind == "loop":  # which needs https, or this
        monkeypatch.setattr(fetch, "urlsplit", lambda url: urlsplit(url)._replace(scheme="https"))
    of_sum = kind in ("wrong", "other")
    names = [f"{url}/{kind}/theirs.patch", f"{url}/{kind if of_sum else 'right'}/theirs.patch.sha256"]
    with unchanged(tree):
        apply(tree, "--patch-url", names[0], "--sha256-file", names[1]).expect(*SPOILT[kind])


def test_without_a_server_without_requests_and_without_a_sum_it_is_said(apply, tree, monkeypatch, tmp_path, repo):
    with unchanged(tree):
        apply(tree, "--patch-url", "http://127.0.0.1:9/theirs.patch", "--sha256", "0" * 64).expect(7, "does not answer")
        apply(tree, "--patch-url", "http://127.0.0.1:9/theirs.patch").expect(3, "no sha256 was given", "--sha256 HEX")
        monkeypatch.setitem(sys.modules, "requests", None)
        apply(tree, "--patch-url", "https://example.org/a.patch", "--sha256", "0" * 64).expect(7, "package requests")
        put(tmp_path, {"theirs.patch": PATCH})
        apply(tree, "--patch-file", tmp_path / "theirs.patch").expect(3, "no sha256 was given")
        apply(tree, "--patch-file", tmp_path / "nowhere.patch", "--sha256", "0" * 64).expect(3, "cannot be read")
    put(tmp_path, {"copy.patch": (repo / "patches/gradloc.patch").read_bytes()})
    apply(tree, "--patch-file", tmp_path / "copy.patch").expect(0, "1.0 for verl v0.7.0")  # whose sum we know


@pytest.mark.parametrize("place", ["http://example.org/p", "ftp://a/p", "https://u:p@a/p", "file:///p", "no-url"])
def test_only_https_is_taken(apply, tree, place):
    apply(tree, "--patch-url", place, "--sha256", "0" * 64).expect(2)


USAGE = [["--sha256", "0"], ["--patch-file", "a", "--patch-url", "https://b"], ["--patch-file", "a", "--sha256", "xyz"]]


@pytest.mark.parametrize(
    "options", [*USAGE, ["--patch-file", "a", "--sha256", "0" * 64, "--sha256-file", "b"]], ids=str
)
def test_what_does_not_go_together_is_wrong_usage(apply, tree, options):
    apply(tree, *options).expect(2)


SUMS = ["", "nothing of the kind\n", f"{SUM}{SUM.replace(SUM[:9], '0' * 9)}", SUM.replace("theirs", "../theirs")]


@pytest.mark.parametrize("text", [*SUMS, SUM.replace("theirs", "/theirs"), SUM[1:], f"{SUM}\n", "\udcff"], ids=ascii)
def test_a_sum_file_that_is_none_is_refused(apply, tree, tmp_path, text):
    put(tmp_path, {"theirs.patch": PATCH, "sum": text.encode(errors="surrogateescape")})
    with unchanged(tree):
        apply(tree, "--patch-file", tmp_path / "theirs.patch", "--sha256-file", tmp_path / "sum").expect(3)


def test_the_publicly_released_patch_is_known_by_its_sum(apply, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PUBLISHED", sha256_hex(PATCH))
    put(tmp_path, {"theirs.patch": PATCH})
    said = apply(tree, "--patch-file", tmp_path / "theirs.patch", "--sha256", sha256_hex(PATCH))
    said.expect(3, "publicly released GradLoc patch")


def test_a_patch_of_the_right_sum_that_breaks_a_rule_is_refused(apply, tree, tmp_path):
    bad = PATCH.replace(ACTOR.encode(), b"verl/../x.py")
    put(tmp_path, {"theirs.patch": bad})
    with unchanged(tree):
        apply(tree, "--patch-file", tmp_path / "theirs.patch", "--sha256", sha256_hex(bad)).expect(3, "section")
