# SPDX-License-Identifier: Apache-2.0
"""The table of formats in docs/logs.md, from the collection that the tests read: python -m tests.report.logs.table"""

import json
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOGS = ROOT / "tests" / "data" / "logs"
ANSWERS = json.loads((LOGS / "answers.json").read_text(encoding="utf-8"))
PAGE = ROOT / "docs" / "logs.md"
BEGIN, END = "<!-- made by python -m tests.report.logs.table -->\n", "<!-- end -->"
SHOWN = 4


def table() -> str:
    """A row for each format: how many files or folders of it are in the collection, and the first of them."""
    known = defaultdict(list)
    for name, answer in ANSWERS.items():
        known[answer["format"] or "refused, with what to do"].append(name)
    rows = ["| what it is | read by the tests | such as |", "| --- | --- | --- |"]
    for form, names in sorted(known.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        rows.append(f"| {form} | {len(names)} | {', '.join(f'`{name}`' for name in names[:SHOWN])}{rest} |")
    return "\n".join([*rows, f"| together | {len(ANSWERS)} | |", ""])


def page() -> str:
    """The page with its table as it must be."""
    return re.sub(
        re.escape(BEGIN) + ".*?" + END, lambda _: BEGIN + table() + END, PAGE.read_text(encoding="utf-8"), flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
