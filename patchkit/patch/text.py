# SPDX-License-Identifier: Apache-2.0
"""What a text that goes into a patch may hold: UTF-8, LF, no invisible or reordering characters."""

import unicodedata


def hidden_character(text: str) -> str | None:
    """Returns the first control or format character of ``text`` as ``U+XXXX``, else None.

    Tab and line feed are fine. Bidirectional controls make code read other than it runs
    (CVE-2021-42574); zero-width characters and a BOM hide in names.
    """
    for char in text:
        if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"):
            return f"U+{ord(char):04X}"
    return None
