# SPDX-License-Identifier: Apache-2.0
"""Gets the patch that the command line names, with the digest it must have."""

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from ..patch import sums
from ..patch.content import sha256_hex
from ..patch.language import MAX_BYTES
from . import download
from .library import Library, check_digest, read_capped


def expected_digest(options: argparse.Namespace, name: str) -> tuple[str | None, list[str]]:
    """Returns what ``--sha256`` or ``--sha256-file`` says of the patch ``name``, and notes on how far to trust it."""
    place, notes = options.sha256_file, []
    if not place:
        return (sums.check_hex(options.sha256) if options.sha256 else None), []
    is_url = "://" in place
    listed = download.fetch(place, sums.MAX_BYTES) if is_url else read_capped(Path(place), sums.MAX_BYTES, place)
    if is_url and options.patch_url and urlsplit(options.patch_url).hostname == urlsplit(place).hostname:
        note = "the checksum came from the server that sent the patch: it proves that it arrived whole, not who made it"
        notes.append(f"{note}; --sha256 with a digest known otherwise does")
    return sums.digest_for(name, listed, place), notes


def named_patch(library: Library, options: argparse.Namespace) -> tuple[bytes, str, list[str]]:
    """Returns the verified patch of ``--patch-file`` or ``--patch-url``, its name, and notes on how far to trust it."""
    file, url = options.patch_file, options.patch_url
    name = urlsplit(url).path.rsplit("/", 1)[-1] if url else Path(file).name
    expected, notes = expected_digest(options, name)
    beside = Path(f"{file}.sha256")
    if file and not expected and beside.is_file():
        expected = sums.digest_for(name, read_capped(beside, sums.MAX_BYTES, str(beside)), str(beside))
    ours = {entry.sha256: entry.size_bytes for entry in library.manifest.entries}
    if url:
        expected = expected or next((e.sha256 for e in library.manifest.entries if e.name == name), next(iter(ours)))
        data = download.fetch(url, limit=ours.get(expected, MAX_BYTES), size=ours.get(expected))
    else:
        data = read_capped(Path(file), MAX_BYTES, file)
    if expected is None and sha256_hex(data) in ours:
        expected = sha256_hex(data)
    check_digest(data, expected, file or url)
    return data, name, notes
