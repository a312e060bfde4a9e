# SPDX-License-Identifier: Apache-2.0
"""The record as Markdown."""

from typing import Any


def markdown(run: dict[str, Any]) -> str:
    """All tables of a run's record."""
    rules = run["rules"]
    parts = []
    if run["real"]:
        parts += ["### Real series\n", _table(["series", "norms", "over 10 x", *rules], _real(run["real"], rules))]
    parts += [
        "### False flags per 1,000 healthy steps\n",
        _table(["series", *rules], _healthy(run["healthy"], rules, "false_flags")),
    ]
    for size in (10, 3, 100):
        parts += [
            f"### Spikes of x {size} missed, in %\n",
            _table(["series", *rules], _healthy(run["healthy"], rules, f"missed_x{size}")),
        ]
    parts += ["### Collapses\n", _table(["growth a step", "mini-batches", *rules], _collapses(run["collapses"], rules))]
    return "\n".join(parts)


def _real(entries: list[dict], rules: list[str]) -> list[list[str]]:
    rows = []
    for entry in entries:
        first = entry["rules"][rules[0]]
        cells = [
            f"{counted['missed']} missed, {100 * counted['flagged'] / counted['others']:.1f} % flagged"
            for counted in (entry["rules"][rule] for rule in rules)
        ]
        rows.append([entry["name"], str(first["over"] + first["others"]), str(first["over"]), *cells])
    return rows


def _healthy(entries: list[dict], rules: list[str], name: str) -> list[list[str]]:
    return [[entry["name"], *(_cell(entry["rules"][rule][name]) for rule in rules)] for entry in entries]


def _collapses(entries: list[dict], rules: list[str]) -> list[list[str]]:
    rows = []
    for entry in entries:
        cells = []
        for counted in (entry["rules"][rule] for rule in rules):
            back = counted["back"]["median"]
            after = f"back after {back:g}" if back <= entry["after"] else f"not back in {entry['after']}"
            cells.append(f"{counted['unseen']['median']:.0f} % unseen, {after}")
        rows.append([f"x {entry['growth']:g}", str(entry["mini_batches"]), *cells])
    return rows


def _cell(summary: dict[str, float]) -> str:
    return f"{summary['median']:.1f} ({summary['mean']:.1f})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"
