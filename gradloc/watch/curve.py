# SPDX-License-Identifier: Apache-2.0
"""Write ``metrics.jsonl``: a line for each optimizer step, from which the report draws a run's curve."""

import json
import os
from collections.abc import Mapping

from ..record.files import parse_json
from ..record.store import plain


class Curve:
    """Appends each step's numbers to ``metrics.jsonl``, whose folder it makes."""

    def __init__(self, path: str):
        self._path, self._has_begun = path, False

    def write(self, step: int, values: Mapping[str, float]) -> str:
        """Append a step's numbers, those that are not finite too: a run's health is judged by them.

        Returns:
            Why the report will have no curve; empty where it will.
        """
        known = {name: float(value) for name, value in values.items()}
        try:
            if not self._has_begun:
                self._has_begun = True
                self._begin(step)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "data": plain(known)}) + "\n")
        except OSError as error:
            return f"{self._path} cannot be written ({error}): the report will have no curve"
        return ""

    def _begin(self, step: int) -> None:
        """Make room for a run that begins at this step: an earlier run's file, which went further, moves aside.

        A run that goes on where an earlier one ended appends to its file.
        """
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        try:
            with open(self._path, "rb") as file:
                file.seek(max(os.path.getsize(self._path) - 2**16, 0))
                last = int(parse_json(file.read().splitlines()[-1])["step"])
        except (FileNotFoundError, IndexError, ValueError, KeyError, TypeError):
            return
        if last >= step:
            base, end = os.path.splitext(self._path)
            number = next(number for number in range(1, 10**6) if not os.path.exists(f"{base}.{number}{end}"))
            os.rename(self._path, f"{base}.{number}{end}")
