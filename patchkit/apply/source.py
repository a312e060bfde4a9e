# SPDX-License-Identifier: Apache-2.0
"""Gets the patch that the command line names, with the digest it must have."""

from argparse import Namespace
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import IntegrityError, UsageError
from ..patch import sums
from ..patch.content import sha256_hex
from ..patch.language import MAX_BYTES
from . import download
from .library import Library, check_digest, read_capped


def expected_digest(options: Namespace, name: str) -> tuple[str | None, list[str]]:
    """Returns what ``--sha256`` or ``--sha256-file`` says of the patch ``name``, and notes on how far to trust it."""
    if options.sha256 and options.sha256_file:
        what = "--sha256 and --sha256-file were both given"
        raise UsageError("digest-twice", what, "One digest decides.", "Leave one out.")
    place = options.sha256_file
    if not place:
        return (sums.check_hex(options.sha256) if options.sha256 else None), []
    if "://" not in place:
        return sums.digest_for(name, _read(place, sums.MAX_BYTES), place), []
    listed = sums.digest_for(name, download.fetch(place, limit=sums.MAX_BYTES), place)
    if not options.patch_url or urlsplit(options.patch_url).hostname != urlsplit(place).hostname:
        return listed, []
    note = "the checksum came from the server that sent the patch: it proves that it arrived whole, not who made it"
    return listed, [note + "; --sha256 with a digest known otherwise does"]


def named_patch(library: Library, options: Namespace) -> tuple[bytes, str, list[str]]:
    """Returns the verified patch of ``--patch-file`` or ``--patch-url``, its name, and notes on how far to trust it."""
    file, url = options.patch_file, options.patch_url
    name = urlsplit(url).path.rsplit("/", 1)[-1] if url else Path(file).name
    expected, notes = expected_digest(options, name)
    if file and not expected and Path(f"{file}.sha256").is_file():
        expected = sums.digest_for(name, _read(f"{file}.sha256", sums.MAX_BYTES), f"{file}.sha256")
    ours = {entry.sha256: entry.size_bytes for entry in library.manifest.entries}
    if url:
        expected = expected or next((e.sha256 for e in library.manifest.entries if e.name == name), next(iter(ours)))
        data = download.fetch(url, limit=ours.get(expected, MAX_BYTES), size=ours.get(expected))
    else:
        data = _read(file, MAX_BYTES)
    if expected is None and sha256_hex(data) in ours:
        expected = sha256_hex(data)
    check_digest(data, expected, file or url)
    return data, name, notes


def _read(place: str, limit: int) -> bytes:
    try:
        return read_capped(Path(place), limit, place)
    except FileNotFoundError as error:
        what = f"there is no file {place}"
        raise IntegrityError(
            "file-missing", what, "It is misspelt, or relative to another folder.", "Check it."
        ) from error
