# SPDX-License-Identifier: Apache-2.0
"""The pinned base: only the released archive, unpacked whole or not at all."""

import io
import tarfile

import pytest

from patchkit.build import base
from patchkit.errors import DownloadError
from patchkit.patch.content import sha256_hex
from patchkit.patch.manifest import Base
from tests.patchkit import world


def archive(folder, members, monkeypatch):
    """Writes a tar.gz and makes it the pinned one."""
    path = folder / "verl-0.7.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(base, "PINNED", {world.V070: sha256_hex(path.read_bytes())})
    monkeypatch.setenv("VERL_BASE_SDIST", str(path))
    return path


GOOD = [("verl-0.7.0", tarfile.DIRTYPE, b""), ("verl-0.7.0/verl/a.py", tarfile.REGTYPE, b"a\n")]


def test_the_named_archive_is_unpacked_once_and_kept(tmp_path, monkeypatch, capsys):
    path = archive(tmp_path, GOOD, monkeypatch)
    tree = base.ensure_base(cache=tmp_path / "cache")
    assert (tree / "verl/a.py").read_bytes() == b"a\n"
    path.unlink()
    assert base.ensure_base(cache=tmp_path / "cache") == tree, "the kept tree needs no archive"
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == ["verl-0.7.0"]
    assert base.main(["--output", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().out == f"{tree}\n"


def test_another_archive_is_refused_with_both_digests(tmp_path, monkeypatch, capsys):
    path = archive(tmp_path, GOOD, monkeypatch)
    path.write_bytes(b"another")
    assert base.main(["--output", str(tmp_path / "cache")]) == 3
    said = capsys.readouterr().err
    assert base.PINNED[world.V070] in said and sha256_hex(b"another") in said
    assert not any((tmp_path / "cache").iterdir())


def test_a_variable_that_names_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_BASE_SDIST", str(tmp_path / "nowhere"))
    with pytest.raises(DownloadError) as caught:
        base.ensure_base(cache=tmp_path / "cache")
    assert caught.value.reason == "base-named-missing"


def test_a_pip_that_fails_is_quoted(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VERL_BASE_SDIST", raising=False)
    monkeypatch.setattr(base, "PINNED", {Base("v0.7.0 and nonsense", ""): ""})
    assert base.main(["--output", str(tmp_path / "cache"), "--base", "v0.7.0 and nonsense"]) == 7
    said = capsys.readouterr().err
    assert "pip could not fetch" in said and "Invalid requirement" in said
