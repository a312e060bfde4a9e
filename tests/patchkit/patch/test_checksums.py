# SPDX-License-Identifier: Apache-2.0
"""Checksum lists and manifests that must be refused: exit 3, the place named, an untouched tree."""

import json
import shutil
from pathlib import Path

import pytest

from patchkit.apply import library
from patchkit.build.cli import check
from patchkit.errors import IntegrityError
from patchkit.patch.content import sha256_hex
from patchkit.patch.language import MAX_BYTES
from tests.patchkit import world

NAME = "gradloc.patch"


@pytest.fixture
def own(patches: Path, tmp_path: Path) -> Path:
    """A patches/ folder that a test may damage."""
    return Path(shutil.copytree(patches, tmp_path / "patches"))


def refused(capsys, own: Path, tree: Path, *options, code: int = 3):
    with world.unchanged(tree):
        outcome = world.run(capsys, own, "--repo", tree, *options).expect(code, "cause:", "next:")
    return outcome.err


def line(digest: str, name: str = NAME) -> str:
    return f"{digest}  {name}\n"


def others(size: int) -> str:
    """Lines of other files, of about so many bytes."""
    return "".join(line("0" * 64, f"{number:032}.patch") for number in range(size // len(line("0" * 64, "0" * 38))))


LISTS = {
    "sums-empty": (lambda d: "", "is empty"),
    "sums-blank": (lambda d: "\n\n", "is empty"),
    "sums-garbage-line": (lambda d: line(d) + "garbage\n", "line 2"),
    "sums-short-digest": (lambda d: line(d[:63]), "line 1"),
    "sums-bare-digest": (lambda d: d + "\n", "line 1"),
    "sums-longer-than-any": (lambda d: line(d) + others(2**16), "at most 65536 bytes"),
    "sums-duplicate": (lambda d: line(d) + line("0" * 64), f"names {NAME} twice"),
    "sums-traversal": (lambda d: line(d, "../x") + line(d), "outside its folder"),
    "sums-absolute": (lambda d: line(d, "/x") + line(d), "outside its folder"),
    "sums-backslash": (lambda d: line(d, "a\\x") + line(d), "outside its folder"),
    "other-name": (lambda d: line(d, "x.patch"), "no line for gradloc.patch"),
    "other-digest": (lambda d: line("0" * 64), "disagree"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_bad_checksum_list_is_refused(capsys, own, tree, case):
    make, said = LISTS[case]
    digest = sha256_hex((own / NAME).read_bytes())
    (own / f"{NAME}.sha256").write_text(make(digest))
    assert said in refused(capsys, own, tree)


@pytest.mark.parametrize("name", [NAME, f"{NAME}.sha256", "manifest.json"])
def test_a_missing_file_is_refused(capsys, own, tree, name):
    (own / name).unlink()
    assert f"{name} cannot be read" in refused(capsys, own, tree)


def test_the_offline_form_takes_the_list_beside_the_patch_or_the_manifest(capsys, own, tree, tmp_path):
    for name in (NAME, f"{NAME}.sha256"):
        shutil.copy(own / name, tmp_path / name)
    assert world.run(capsys, own, "--repo", tree, "--patch-file", tmp_path / NAME).code == 0
    (tmp_path / f"{NAME}.sha256").unlink()
    assert world.run(capsys, own, "--repo", tree, "--patch-file", tmp_path / NAME).code == 0
    (tmp_path / NAME).write_text("diff --git a/verl/x b/verl/x\n")
    said = refused(capsys, own, tree, "--patch-file", tmp_path / NAME)
    assert "no checksum for" in said and "--sha256" in said


def test_the_list_beside_a_patch_is_believed_before_the_manifest(capsys, own, tree, tmp_path):
    shutil.copy(own / NAME, tmp_path / NAME)
    (tmp_path / f"{NAME}.sha256").write_text(line("0" * 64))
    said = refused(capsys, own, tree, "--patch-file", tmp_path / NAME)
    assert "expected: " + "0" * 64 in said


def test_a_file_that_the_manifest_does_not_name_fails_the_check_of_the_build(own, tmp_path):
    expected = {path.relative_to(own).as_posix(): path.read_bytes() for path in own.rglob("*.*")}
    check(expected, own)
    (own / "extra.patch").write_text("x\n")
    with pytest.raises(IntegrityError) as caught:
        check(expected, own)
    assert caught.value.reason == "build-unlisted" and caught.value.exit_code == 3
    assert "patches/extra.patch" in caught.value.what


def test_one_flipped_byte_is_refused_with_both_digests(capsys, own, tree):
    data = bytearray((own / NAME).read_bytes())
    expected = sha256_hex(bytes(data))
    data[-5] ^= 1
    (own / NAME).write_bytes(bytes(data))
    said = refused(capsys, own, tree)
    assert f"expected: {expected}" in said and f"found:    {sha256_hex(bytes(data))}" in said


@pytest.mark.parametrize(
    "style",
    [str.upper, lambda text: text.replace("\n", "\r\n"), lambda text: text.replace("  ", " *")],
    ids=["hash-uppercase", "crlf-list", "binary-star"],
)
def test_other_spellings_of_the_same_list_are_accepted(capsys, own, tree, style):
    text = (own / f"{NAME}.sha256").read_text()
    styled = style(text).replace(NAME.upper(), NAME)
    (own / f"{NAME}.sha256").write_bytes(styled.encode())
    assert world.run(capsys, own, "--repo", tree).code == 0


def test_an_uppercase_digest_on_the_command_line_is_accepted_and_a_short_one_is_not(capsys, own, tree):
    digest = sha256_hex((own / NAME).read_bytes()).upper()
    options = ("--patch-file", own / NAME, "--patch-sha256")
    assert world.run(capsys, own, "--repo", tree, *options, digest).code == 0
    assert "64 hex digits" in refused(capsys, own, tree, *options, digest[:63], code=2)


def edited(change) -> str:
    def make(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    return make


def _set(*keys, value):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return edited(change)


def _drop(*keys):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return edited(change)


ENTRY = ("patches", 0)
MANIFESTS = {
    "truncated": (lambda text: text[:200], "line 7"),
    "trailing-comma": (lambda text: text.replace("}\n", ",}\n"), "not JSON at line"),
    "not-utf8": (lambda text: text[:60] + "\udcff", "not JSON"),
    "unknown-key": (_set("extra", value=1), "$.extra"),
    "unknown-key-deep": (_set(*ENTRY, "extra", value=1), "$.patches[0].extra"),
    "missing-key": (_drop(*ENTRY, "commit"), "$.patches[0].commit"),
    "wrong-type": (_set("patches", value={}), "$.patches"),
    "bool-for-int": (_set("schema_version", value=True), "$.schema_version"),
    "not-an-object": (lambda text: "[]", "wrong at $"),
    "no-patches": (_set("patches", value=[]), "$.patches"),
    "short-digest": (_set(*ENTRY, "sha256", value="00"), "sha256"),
    "repeated-key": (lambda text: text.replace("{", '{"version": "9",', 1), "not as make_patch.sh writes it"),
    "patch-elsewhere": (_set(*ENTRY, "name", value="../../x"), "$.patches[0].name"),
    "future-schema": (_set("schema_version", value=99), "newer than this tool"),
    "past-schema": (_set("schema_version", value=1), "$.schema_version"),
    "nan": (_set("schema_version", value=float("nan")), "$.schema_version"),
    "12-1e400": (lambda text: text.replace('"schema_version": 2', '"schema_version": 1e400'), "$.schema_version"),
    "huge-integer": (_set("schema_version", value=10**300), "newer than this tool"),
    "nesting": (lambda text: "[" * 10**6, "nested too deeply"),
    "too-large": (lambda text: text + " " * 2**21, "too large"),
    "other-patch": (_set(*ENTRY, "sha256", value="1" * 64), "disagree"),
    "negative-size": (_set(*ENTRY, "size_bytes", value=-5), "$.patches[0].size_bytes"),
    "endless-size": (_set(*ENTRY, "size_bytes", value=10**300), "$.patches[0].size_bytes"),
    "smaller-patch": (_set(*ENTRY, "size_bytes", value=9), "too large"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_bad_manifest_is_refused_with_the_place(capsys, own, tree, case):
    change, said = MANIFESTS[case]
    path = own / "manifest.json"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    assert said in refused(capsys, own, tree)


@pytest.mark.parametrize("name", ["manifest.json", "huge.patch"])
def test_a_file_of_two_gigabytes_is_not_read(capsys, own, tree, name):
    with (own / name).open("wb") as stream:
        stream.truncate(2 * 2**30)
    options = ("--patch-file", own / name, "--patch-sha256", "0" * 64) if name == "huge.patch" else ()
    said = refused(capsys, own, tree, *options)
    assert "too large" in said and (not options or f"at most {MAX_BYTES} bytes" in said)


def test_the_publicly_released_patch_is_named_and_refused(capsys, own, tree, tmp_path, monkeypatch):
    # Its bytes are not ours to keep, so another file takes the place of its digest.
    stand_in = tmp_path / "released.patch"
    stand_in.write_text("diff --git a/verl/x.py b/verl/x.py\n")
    digest = sha256_hex(stand_in.read_bytes())
    assert library.PUBLISHED_SHA256.startswith("9bd7c21f7a95a5b9")
    monkeypatch.setattr(library, "PUBLISHED_SHA256", digest)
    for options in ((), ("--patch-sha256", digest)):
        said = refused(capsys, own, tree, "--patch-file", stand_in, *options)
        assert "publicly released GradLoc patch" in said
        assert "every training run stops" in said and "Leave out --patch-file" in said
        assert "final newline" in said and "abbreviated" in said


RELEASES = {
    "unnamed": (lambda text: text.replace("Release: ", ""), "does not say which release"),
    "path-outside": (lambda text: text.replace(world.NEW, "verl/../x"), "verl/../x"),
    "short-id": (lambda text: text.replace("index 0", "index ", 1), "abbreviated"),
    "cut-off": (lambda text: text[:-1], "ends without a line end"),
}


@pytest.mark.parametrize("case", RELEASES)
def test_what_is_kept_of_a_release_is_refused_where_it_was_edited(capsys, own, tree, case):
    change, said = RELEASES[case]
    (path,) = (own / "released").iterdir()
    path.write_text(change(path.read_text()))
    assert said in refused(capsys, own, tree)
