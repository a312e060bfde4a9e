# SPDX-License-Identifier: Apache-2.0
"""A run's cells as Markdown tables."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from lab.benchmarks.localization.plan import ALL
from lab.benchmarks.run import table
from tests.toy_model import shape_of

Records = list[dict[str, Any]]


def markdown(run: dict[str, Any]) -> str:
    """All tables of a run."""
    sweeps: dict[str, Records] = {}
    for cell in run["cells"]:
        sweeps.setdefault(cell["cell"]["sweep"], []).append(cell)
    parts = [f"`{run['command']}`"]

    def add(title: str, *tables: str) -> None:
        parts.extend([f"### {title}", *tables])

    for dtype, cells in sorted(_grouped(sweeps.get("battery", []), "dtype"), reverse=True):
        add(f"Battery, {dtype}", _recall_table(cells))
        add(f"Cost on the battery, {dtype}", _cost_table(cells))
    if "pretrained" in sweeps:
        add("A pretrained language model", _pretrained_table(sweeps["pretrained"]))
    if "masters" in sweeps:
        add("Masters in bfloat16", _recall_table(sweeps["masters"]), _cost_table(sweeps["masters"]))
    if "plants" in sweeps:
        add("Sure culprits, and whole batches", _plants_table(sweeps["plants"]))
    for sweep in ("tokens", "micro_batches", "ranks", "model", "culprits"):
        if sweep in sweeps:
            add(f"Varying {sweep}", _sweep_table(sweep, sweeps[sweep]))
    return "\n\n".join(parts)


def strategies_of(cells: Iterable[dict[str, Any]]) -> list[str]:
    """The names of the strategies that ran, the baseline first."""
    ran = {name for cell in cells for name in cell["strategies"]}
    return [name for name in ALL if name in ran]


def _recall_table(cells: Records) -> str:
    names = strategies_of(cells)
    rows = [["scenario", *names, "auto's verdicts"]]
    for scenario, group in _grouped(cells, "scenario"):
        row = [scenario]
        for name in names:
            found = _found(group, name)
            if not found:
                row.append("no spike" if not any(c["spikes"] for c in group) else "-")
                continue
            false = sum(f["false_positives"] for f in found)
            row.append(_recall(found) + (f" ({false} false)" if false else ""))
        row.append(_counted(f["verdict"] for f in _found(group, "auto")))
        rows.append(row)
    return table(rows)


def _plants_table(cells: Records) -> str:
    """A row for each form of a plant: what `auto` named, and what it said made the spike where no token did."""
    rows = [["plant", "computed in", "loss", "history", "recall", "false", "verdicts", "source", "f", "closure"]]
    keys = ("scenario", "dtype", "aggregation", "has_history")
    for form in dict.fromkeys(tuple(c["cell"][key] for key in keys) for c in cells):
        group = [c for c in cells if tuple(c["cell"][key] for key in keys) == form]
        found = _found(group, "auto")
        row = [*form[:3], "yes" if form[3] else "no"]
        if not found:
            rows.append([*row, *["no spike"] * 6])
            continue
        closures = [_closure(f) for f in found if f["closure"] is not None]
        row += [_recall(found), str(sum(f["false_positives"] for f in found)), _counted(f["verdict"] for f in found)]
        row += [_counted(f["source"] or "none" for f in found), ", ".join(str(f["cost_f"]) for f in found)]
        rows.append([*row, ", ".join(closures) or "-"])
    return table(rows)


def _closure(found: dict[str, Any]) -> str:
    return f"{found['closure']:.3f} ± {_number(found['closure_error'], '.3f')}"


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _recall(found: Records) -> str:
    """The mean; - where nothing was planted."""
    known = [f["recall"] for f in found if f["recall"] is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"


def _cost_table(cells: Records) -> str:
    names = strategies_of(cells)
    rows = [["scenario", *(f"{n}: f, wall" for n in names), "auto's closure", "norm error"]]
    rows[0].append("auto within its bound")
    for scenario, group in _grouped(cells, "scenario"):
        row = [scenario]
        for name in names:
            found = _found(group, name)
            if found:
                cost = median(f["cost_f"] for f in found)
                row.append(f"{cost:.0f}, {_number(_median_of(found, 'wall_ratio'), '.2f')}")
            else:
                row.append("-")
        auto = _found(group, "auto")
        closures = [f["closure"] for f in auto if f["closure"] is not None]
        errors = [f["largest_norm_error"] for f in auto if f["largest_norm_error"] is not None]
        row.append(f"{min(closures):.3f} to {max(closures):.3f}" if closures else "-")
        row.append(f"{max(errors):.1e}" if errors else "-")
        within = [f["cost_f"] <= bound_of(c) for c, f in zip(group, auto, strict=True)]
        row.append(f"{sum(within)} of {len(within)}")
        rows.append(row)
    return table(rows)


def _pretrained_table(cells: Records) -> str:
    """A row for each cell: what `published` and `auto` found, at what cost, and how far the certificate is off."""
    head = ["scenario", "computed in", "published: recall, f, s", "auto: recall, false, verdict", "f", "s", "MiB"]
    rows = [[*head, "closure", "norm without: stated, bound", "error", "norm, threshold"]]
    for cell in cells:
        where, published, auto = cell["cell"], cell["strategies"].get("published"), cell["strategies"].get("auto")
        row = [where["scenario"], where["dtype"]]
        if auto is None:
            rows.append([*row, *["no spike"] * 8, f"{cell['grad_norm']:.3g}, {cell['history']['threshold']:.3g}"])
            continue
        told = "-"
        if published is not None:
            told = f"{_recall([published])}, {published['cost_f']}, {published['seconds']:.0f}"
        row += [told, f"{_recall([auto])}, {auto['false_positives']}, {auto['verdict']}", str(auto["cost_f"])]
        row += [f"{auto['seconds']:.0f}", _number(auto["peak_extra_mib"], ".0f"), _number(auto["closure"], ".3f")]
        error = abs(auto["norm_after"] - auto["norm_without"])
        row += [f"{auto['norm_after']:.4g}, {auto['error_bound']:.2g}", f"{error:.2g}"]
        rows.append([*row, f"{cell['grad_norm']:.3g}, {cell['history']['threshold']:.3g}"])
    return table(rows)


def _sweep_table(sweep: str, cells: Records) -> str:
    names = strategies_of(cells)
    head = [sweep, "scenario", "published by formula (f)", "auto's bound (f)"]
    rows = [[*head, *(f"{n}: recall, f, of formula, wall ratio, s, MiB" for n in names)]]
    key = {"culprits": "count"}.get(sweep, sweep)
    order = {"XS": 0, "S": 1, "M": 2}
    for cell in sorted(cells, key=lambda c: (c["cell"]["kappa"], order.get(c["cell"][key], c["cell"][key]))):
        where = cell["cell"]
        kappa = f" {where['kappa']:.0f}" if where["count"] else ""
        row = [str(where[key]), where["scenario"] + kappa, f"{cell['published_formula_f']:.0f}"]
        row.append(str(bound_of(cell)) if "auto" in cell["strategies"] else "-")
        for name in names:
            found = cell["strategies"].get(name)
            row.append("no spike" if not cell["spikes"] else "-" if found is None else _sums(found))
        rows.append(row)
    return table(rows)


def holders_of(cell: dict[str, Any]) -> set[int]:
    """The micro-batches in which ``auto`` named a culprit."""
    where = cell["cell"]
    rows, _ = shape_of(where["tokens"])
    each = rows // (where["ranks"] * where["micro_batches"])
    named = cell["strategies"]["auto"]["culprits"]
    return {place[0] // each % where["micro_batches"] for culprit in named for place in culprit["places"]}


def bound_of(cell: dict[str, Any]) -> int:
    """What ``auto`` may cost at most, in f: 2M + 12, and 6 for each micro-batch with a culprit."""
    return 2 * cell["cell"]["micro_batches"] + 12 + 6 * len(holders_of(cell))


def _sums(found: dict[str, Any]) -> str:
    false = f" ({found['false_positives']} false)" if found["false_positives"] else ""
    memory = found["peak_extra_mib"]
    return (
        f"{_recall([found])}{false}, {found['cost_f']}, {found['cost_ratio']:.2f}, "
        f"{_number(found['wall_ratio'], '.2f')}, {found['seconds']:.2f}, {_number(memory, '.0f')}"
    )


def _grouped(cells: Records, key: str) -> list[tuple[str, Records]]:
    names = dict.fromkeys(cell["cell"][key] for cell in cells)
    return [(name, [c for c in cells if c["cell"][key] == name]) for name in names]


def _found(cells: Records, name: str) -> Records:
    return [c["strategies"][name] for c in cells if name in c["strategies"]]


def _median_of(found: Records, key: str) -> float | None:
    values = [f[key] for f in found if f[key] is not None]
    return median(values) if values else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
