# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format: what a trainer's endpoint answers, one scrape after another."""

import re

from .grammars import Grammar
from .names import as_step, number, step_of
from .pairs import NUMBER, as_float, wanted

_EXPOSED = re.compile(rf"([a-z_:][\w:]*)(\{{[^{{}}]*\}})?\s+(\+?{NUMBER})(?:\s+\d{{10,16}})?\s*", re.IGNORECASE)
_ITS_STEP = re.compile(r"(?<!per)(?:^|[_/])(?:steps?|iterations?)(?:_total)?$", re.IGNORECASE)
_LABELS = re.compile(r'(\w+)="([^"]*)"')


class Exposed(Grammar):
    """Prometheus' text: ``train_loss{rank="0"} 0.25``, one scrape after another, or with the step as a label."""

    title = "Prometheus' text"

    def __init__(self) -> None:
        super().__init__()
        self._scrape: dict[str, float] = {}
        self._seen: set[str] = set()
        self._last = ""
        self.is_open = False
        """Whether a line has said that such metrics come."""
        self.unplaced: list[str] = []
        """The names of metrics of scrapes that do not say their step."""

    def take(self, line: str, process: str) -> bool:
        self.is_open |= line.startswith(("# TYPE ", "# HELP "))
        found = _EXPOSED.fullmatch(line) if self.is_open or '="' in line else None
        if found is None:
            return False
        name, labels, value = found[1].replace(":", "/"), dict(_LABELS.findall(found[2] or "")), as_float(found[3])
        step = step_of({key: number(text) for key, text in labels.items()})
        if step is not None:
            rows = self.rows[process]
            if rows and rows[-1][0] == step and name not in rows[-1][1]:
                rows[-1][1][name] = value
                return True
            return self.add(process, step, {name: value})
        is_twice, self._last = line == self._last, line
        if found[1] + (found[2] or "") in self._seen and not is_twice:
            self.close()
        self._seen.add(found[1] + (found[2] or ""))
        self._scrape.setdefault(name, value)
        return True

    def close(self) -> None:
        """Make a row of what was read since the last scrape began."""
        step = next((as_step(self._scrape.pop(name)) for name in [*self._scrape] if _ITS_STEP.search(name)), None)
        if step is not None:
            self.add("", step, self._scrape)
        else:
            self.unplaced += wanted(self._scrape)
        self._scrape, self._seen = {}, set()
