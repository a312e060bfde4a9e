# SPDX-License-Identifier: Apache-2.0
"""Networks and servers that fail or mean harm. Exit 7, or 3 where the bytes are wrong."""

import socket
import time
from time import sleep

import pytest

from patchkit.apply import download
from patchkit.errors import DownloadError
from patchkit.patch.content import sha256_hex
from tests.patchkit import world
from tests.patchkit.apply.servers import serving
from tests.patchkit.world import BASE, RESULT


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(patches, tmp_path, monkeypatch):
    content = (patches / "gradloc.patch").read_bytes()
    sums = (patches / "gradloc.patch.sha256").read_bytes()
    with serving(tmp_path, content, sums) as running:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        yield running


@pytest.fixture
def waits(monkeypatch):
    """The seconds that a download would have waited between attempts."""
    noted = []
    monkeypatch.setattr(download, "DEADLINE_S", 1.9)
    monkeypatch.setattr(download.time, "sleep", lambda s: noted.append(s) if s >= 0.1 else sleep(s))
    return noted


def url(server, behaviour: str, name: str = "gradloc.patch") -> str:
    return f"https://localhost:{server.server_address[1]}/{behaviour}/{name}"


def test_the_published_online_form_works_and_says_what_the_checksum_proves(apply, server, tree):
    sums = url(server, "sums", "gradloc.patch.sha256")
    outcome = apply("--repo", tree, "--patch-url", url(server, "plain"), "--sha256-file", sums)
    assert outcome.code == 0, outcome.err
    assert "not who made it" in outcome.out
    assert world.files_of(tree) == RESULT


@pytest.mark.parametrize("behaviour", ["plain", "chunked", "hop"])
def test_a_download_is_applied_when_its_digest_is_known(apply, server, tree, behaviour):
    assert apply("--repo", tree, "--patch-url", url(server, behaviour)).code == 0
    assert world.files_of(tree) == RESULT


@pytest.mark.parametrize("behaviour", ["busy-once", "short-once"])
def test_a_passing_failure_is_tried_again(apply, server, tree, waits, behaviour):
    assert apply("--repo", tree, "--patch-url", url(server, behaviour)).code == 0
    assert waits == [1.0]


BAD = {
    "https-to-http-hop": ("to-http", 7, "only https"),
    "redirect-loop": ("loop", 7, "redirects"),
    "file-hop": ("to-file", 7, "only https"),
    "503-three-times": ("busy", 7, "HTTP 503"),
    "short-body": ("short", 7, "bytes arrived"),
    "cut-chunk": ("cut-chunk", 7, "3 attempts"),
    "close-delimited-cut": ("until-close", 3, "size"),
    "drip": ("drip", 7, "too long"),
    "gzip-bomb": ("bomb", 7, "compressed"),
    "wrong-size": ("larger", 3, "size"),
    "endless": ("endless", 3, "size"),
    "wrong-hash": ("other", 3, "sha256"),
    "page": ("page", 3, "web page"),
    "404": ("missing", 7, "HTTP 404"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_server_is_refused_and_nothing_left(apply, server, tree, waits, tmp_path, case):
    behaviour, code, said = BAD[case]
    with world.unchanged(tmp_path):
        outcome = apply("--repo", tree, "--patch-url", url(server, behaviour))
        assert outcome.code == code, outcome.err
        assert said in outcome.err and "next:" in outcome.err
    if case == "503-three-times":
        assert len(server.requests) == 3 and len(waits) == 2


ADDRESSES = {
    "http-url": ("http://localhost/gradloc.patch", "only https"),
    "ftp-url": ("ftp://localhost/gradloc.patch", "only https"),
    "data-url": ("data://text,x", "only https"),
    "no-host": ("https:///gradloc.patch", "only https"),
    "userinfo": ("https://me:secret@localhost/gradloc.patch", "user name or a password"),
    "blob-page": (
        "https://github.com/o/r/blob/main/patches/gradloc.patch",
        "https://github.com/o/r/raw/main/patches/gradloc.patch",
    ),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_a_bad_address_is_refused_without_a_request(apply, tree, case, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    address, said = ADDRESSES[case]
    outcome = apply("--repo", tree, "--patch-url", address).expect(7, said)
    assert "secret" not in outcome.err


def test_net_dns_failure_is_exit_7(apply, tree, waits, monkeypatch):
    def fail(*arguments, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    apply("--repo", tree, "--patch-url", "https://nowhere.example/gradloc.patch").expect(7, "Name or service not known")


def test_net_tls_error_is_exit_7(apply, server, tree, waits, monkeypatch):
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    apply("--repo", tree, "--patch-url", url(server, "plain")).expect(7, "CERTIFICATE_VERIFY_FAILED")


def test_passwords_are_not_taken_from_netrc(server, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine localhost login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    real = server.RequestHandlerClass.plain
    monkeypatch.setattr(
        server.RequestHandlerClass,
        "plain",
        lambda self, content: (seen.append(self.headers.get("Authorization")), real(self, content)),
    )
    download.fetch(url(server, "plain"), limit=10**6)
    assert seen == [None]


def test_the_deadline_holds_for_all_attempts_together(server, monkeypatch):
    monkeypatch.setattr(download, "DEADLINE_S", 0.5)
    began = time.monotonic()
    with pytest.raises(DownloadError):
        download.fetch(url(server, "drip"), limit=10**6)
    assert time.monotonic() - began < 3


def test_an_unknown_patch_needs_its_digest(apply, server, tree):
    outcome = apply("--repo", tree, "--patch-url", url(server, "other"), "--patch-sha256", "0" * 64)
    assert outcome.code == 3 and "expected: " + "0" * 64 in outcome.err
    changed = server.content.replace(b"hook()", b"hack()")
    options = ("--patch-sha256", sha256_hex(changed))
    refused = apply("--repo", tree, "--patch-url", url(server, "other"), *options)
    assert refused.code == 3, "the digest is right, but the result is not what its ids say"
    assert world.files_of(tree) == BASE


def test_two_sources_for_the_digest_are_refused(apply, tree, patches):
    options = ("--patch-file", patches / "gradloc.patch", "--patch-sha256", "0" * 64, "--sha256-file", "x")
    apply("--repo", tree, *options).expect(2, "not allowed with")
