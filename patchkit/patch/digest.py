# SPDX-License-Identifier: Apache-2.0
"""What identifies a file's content: its sha256, its git blob id, its size."""

import hashlib
from dataclasses import dataclass

ABSENT_BLOB = "0" * 40
"""How an ``index`` line of a patch writes "no file"."""


def sha256_hex(data: bytes) -> str:
    """Returns the sha256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """Returns the id that git (in its sha1 object format) gives to ``data`` as a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Digest:
    """A file's content, by its digests. ``sha256`` is None where only a patch's index line says."""

    blob: str
    sha256: str | None = None
    size_bytes: int | None = None

    @classmethod
    def of(cls, data: bytes) -> "Digest":
        """Returns the full digest of ``data``."""
        return cls(blob_id(data), sha256_hex(data), len(data))

    def admits(self, data: bytes) -> bool:
        """True if ``data`` agrees with everything that this digest knows."""
        return (
            (self.size_bytes is None or self.size_bytes == len(data))
            and blob_id(data) == self.blob
            and (self.sha256 is None or self.sha256 == sha256_hex(data))
        )

    def short(self) -> str:
        """Returns 12 hex digits for a message, with the name of the digest they belong to."""
        return f"sha256 {self.sha256[:12]}" if self.sha256 else f"git blob {self.blob[:12]}"
