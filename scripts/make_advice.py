#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/advice.md from advice.md.in, ``gradloc.explain`` and the rules of health."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gradloc.explain.advice import ACTIONS, VERLS, lines_of  # noqa: E402
from gradloc.explain.causes import CAUSE_INFO, RULES  # noqa: E402
from gradloc.explain.cures import MILDEST_FIRST, is_measured  # noqa: E402
from gradloc.health.rules import ADVICE  # noqa: E402

PAGE = Path(__file__).with_name("advice.md.in").read_text(encoding="utf-8")


def _italic(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"*\1*", text)


def _all(names: tuple[str, ...]) -> str:
    return " ".join(ACTIONS[name].do for name in names)


def _trainers_of(cure: str) -> str:
    found = ", ".join(name for name in ("verl 0.7", "verl 0.9", "TRL") if is_measured(cure, name.lower()))
    return {"verl 0.7, verl 0.9, TRL": "all", "verl 0.7, verl 0.9": "verl"}.get(found, found)


def _causes_of(cure: str) -> str:
    return ", ".join(f"`{label}`" for label, found in CAUSE_INFO.items() if cure in found.cures)


def _line(name: str) -> str:
    """Return an action's line on verl, else in a loop; empty where it has none."""
    action = ACTIONS[name]
    return action.line("0.9") or action.line("0.7") or next(iter(lines_of(name, "loop").values()), "")


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    rules = []
    for rule in RULES:
        action = ACTIONS[rule.do[0]]
        parts = [f"### {rule.seen}", _italic(rule.say) or action.do]
        if line := _line(rule.do[0]):
            parts.append(f"    {line}")
        items = [("Else", _all(rule.do[1:])), ("Why", _italic(rule.why)), ("Fixed when", rule.check)]
        rules.append("\n\n".join([*parts, "\n".join(f"- {name}: {text}" for name, text in items if text)]))
    actions = []
    for name, action in ACTIONS.items():
        lines = {f"verl {verl}": action.line(verl) for verl in VERLS if action.line(verl)}
        if len(lines) == len(VERLS) and len({*lines.values()}) == 1:
            lines = {"both": lines.popitem()[1]}
        if not lines and (line := _line(name)):
            lines = {"a loop": line}
        known = "; ".join(f"{where}: `{line}`" for where, line in lines.items())
        actions.append(f"- {action.do} {known}".rstrip())
    causes = [
        f"- `{label}`: {found.title}. {f'{found.means} {found.means_of_batch}'.strip()} "
        f"{'' if found.why else 'Usual remedies: ' + _all(found.do)}".rstrip()
        for label, found in CAUSE_INFO.items()
    ]
    reasons = [f"- `{name}`: {_all(names)}" for name, names in ADVICE.items()]
    cures = [f"- {ACTIONS[name].do} On {_trainers_of(name)}, for {_causes_of(name)}." for name in MILDEST_FIRST]
    return {
        ROOT / "docs" / "advice.md": PAGE.format(
            rules=_italic("\n\n".join(rules)),
            actions="\n".join(actions),
            causes="\n".join(causes),
            cures="\n".join(cures),
            reasons="\n".join(reasons),
        )
    }


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
