# SPDX-License-Identifier: Apache-2.0
"""Gets the patch that the command line names, with the digest it must have."""

from pathlib import Path
from urllib.parse import urlsplit

from ..errors import IntegrityError, UsageError
from ..patch import sums
from ..patch.digest import sha256_hex
from ..patch.language import MAX_BYTES
from . import download
from .library import Library, check_digest, read_capped


def named_patch(
    library: Library, file: str | None, url: str | None, digest: str | None, sums_at: str | None
) -> tuple[bytes, str, list[str]]:
    """Returns the verified patch that was named, its name, and notes on how far to trust it.

    Args:
        library: the editions whose digests are known without being named.
        file: ``--patch-file``, a path.
        url: ``--patch-url``; exactly one of the two is given.
        digest: ``--patch-sha256``.
        sums_at: ``--sha256-file``, a path or a URL.
    """
    if digest and sums_at:
        raise UsageError("digest-twice")
    place = file or url or ""
    name = urlsplit(url).path.rsplit("/", 1)[-1] if url else Path(place).name
    notes: list[str] = []
    expected = sums.check_hex(digest) if digest else None
    if sums_at:
        expected, notes = _listed(sums_at, name, url)
    elif file and not expected and Path(f"{file}.sha256").is_file():
        beside = read_capped(Path(f"{file}.sha256"), sums.MAX_BYTES, f"{file}.sha256")
        expected = sums.digest_for(name, beside, f"{file}.sha256")
    sizes = {edition.patch_sha256: edition.patch_size for edition in library.editions}
    if url:
        expected = expected or library.wanted.patch_sha256
        data = download.fetch(url, limit=sizes.get(expected, MAX_BYTES), size=sizes.get(expected))
    else:
        data = read_capped(Path(place), MAX_BYTES, place)
    if expected is None and sha256_hex(data) in sizes:
        expected = sha256_hex(data)
    if expected is None:
        check_digest(data, sha256_hex(data), place)  # the public patch has a refusal of its own
        raise IntegrityError("sums-missing", path=place, name=name)
    check_digest(data, expected, place)
    return data, name, notes


def _listed(sums_at: str, name: str, url: str | None) -> tuple[str, list[str]]:
    if not download.is_url(sums_at):
        return sums.digest_for(name, read_capped(Path(sums_at), sums.MAX_BYTES, sums_at), sums_at), []
    listed = sums.digest_for(name, download.fetch(sums_at, limit=sums.MAX_BYTES), sums_at)
    notes = []
    if url and urlsplit(url).hostname == urlsplit(sums_at).hostname:
        notes.append(
            "the checksum came from the server that sent the patch: it proves that the patch "
            "arrived whole, not who made it; --patch-sha256 with a digest known otherwise does"
        )
    return listed, notes
