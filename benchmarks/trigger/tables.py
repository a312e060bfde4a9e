# SPDX-License-Identifier: Apache-2.0
"""The record as Markdown."""

from typing import Any

from benchmarks.run import table


def markdown(run: dict[str, Any]) -> str:
    """All tables of a run's record."""
    rules, healthy = run["rules"], run["healthy"]
    parts = []
    if run["real"]:
        rows = _real(run["real"], rules)
        parts += ["### Real series", table([["series", "norms", "over 10 x", *rules], *rows])]
    head = ["series", *rules]
    parts += ["### False flags per 1,000 healthy steps", table([head, *_healthy(healthy, rules, "false_flags")])]
    for size in (10, 3, 100):
        parts += [f"### Spikes of x {size} missed, in %", table([head, *_healthy(healthy, rules, f"missed_x{size}")])]
    rows = _collapses(run["collapses"], rules)
    parts += ["### Collapses", table([["growth a step", "mini-batches", *rules], *rows])]
    return "\n\n".join(parts)


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
