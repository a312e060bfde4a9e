# SPDX-License-Identifier: Apache-2.0
"""Every sentence with which this package refuses, in one place.

A refusal reads: what and where; expected against found; the likely cause; the next command. The
errors carry a reason and data; ``render_error`` makes the text.
"""

from typing import Any

from ..errors import PatchkitError, program
from . import building, checkouts, patches
from .words import Words

WORDS: dict[str, Words] = {**patches.WORDS, **checkouts.WORDS, **building.WORDS}


def render_error(error: PatchkitError) -> str:
    """Returns the text of a refusal, without a final newline."""
    parts = parts_of(error)
    lines = [f"refused: {parts['what']}"]
    lines += [
        f"  {label + ':':<9} {parts[label]}" for label in ("expected", "found", "cause", "next") if parts.get(label)
    ]
    return "\n".join(lines + [f"  {line}" for line in error.data.get("diff", ())])


def parts_of(error: PatchkitError) -> dict[str, Any]:
    """Returns the parts of a refusal: reason, what, expected, found, cause, next."""
    words = WORDS[error.reason]
    data = {"target": "VERL"} | {key: value for key, value in error.data.items()}
    parts = {"reason": error.reason, "what": words.what.format(**data)}
    for key in ("expected", "found"):
        if error.data.get(key) is not None:
            parts[key] = str(error.data[key])
    parts["cause"] = words.cause.format(**data)
    plain = words.next_without_git if data.get("is_clone") is False else ""
    parts["next"] = (plain or words.next).format(**data).replace("python apply_patch.py", program())
    return parts
