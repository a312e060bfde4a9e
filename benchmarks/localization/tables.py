# SPDX-License-Identifier: Apache-2.0
"""A run's cells as Markdown tables and one figure."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.localization.plan import ALL
from tests.bare import shape_of

Records = list[dict[str, Any]]


def markdown(run: dict[str, Any]) -> str:
    """All tables of a run."""
    cells: Records = run["cells"]
    parts = [f"`{run['command']}`", ""]
    battery = [c for c in cells if c["cell"]["sweep"] == "battery"]
    for dtype in sorted({c["cell"]["dtype"] for c in battery}, reverse=True):
        chosen = [c for c in battery if c["cell"]["dtype"] == dtype]
        parts += [f"### Battery, {dtype}", "", _recall_table(chosen), ""]
        parts += [f"### Cost on the battery, {dtype}", "", _cost_table(chosen), ""]
    large = [c for c in cells if c["cell"]["sweep"] == "pretrained"]
    if large:
        parts += ["### A pretrained language model", "", _pretrained_table(large), ""]
    masters = [c for c in cells if c["cell"]["sweep"] == "masters"]
    if masters:
        parts += ["### Masters in bfloat16", "", _recall_table(masters), "", _cost_table(masters), ""]
    planted = [c for c in cells if c["cell"]["sweep"] == "plants"]
    if planted:
        parts += ["### Sure culprits, and whole batches", "", _plants_table(planted), ""]
    for sweep in ("tokens", "micro_batches", "ranks", "model", "culprits"):
        chosen = [c for c in cells if c["cell"]["sweep"] == sweep]
        if chosen:
            parts += [f"### Varying {sweep}", "", _sweep_table(sweep, chosen), ""]
    return "\n".join(parts)


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
    return _table(rows)


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
    return _table(rows)


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
    return _table(rows)


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
        told = "-" if published is None else _sums_short(published)
        row += [told, f"{_recall([auto])}, {auto['false_positives']}, {auto['verdict']}", str(auto["cost_f"])]
        row += [f"{auto['seconds']:.0f}", _number(auto["peak_extra_mib"], ".0f"), _number(auto["closure"], ".3f")]
        error = abs(auto["norm_after"] - auto["norm_without"])
        row += [f"{auto['norm_after']:.4g}, {auto['error_bound']:.2g}", f"{error:.2g}"]
        rows.append([*row, f"{cell['grad_norm']:.3g}, {cell['history']['threshold']:.3g}"])
    return _table(rows)


def _sums_short(found: dict[str, Any]) -> str:
    return f"{_recall([found])}, {found['cost_f']}, {found['seconds']:.0f}"


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
    return _table(rows)


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


def plot(run: dict[str, Any], path: Path) -> bool:
    """Cost over N, M and the number of culprits; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "gradloc"
    panels = [("tokens", "tokens", "N, response tokens"), ("micro_batches", "micro_batches", "M")]
    panels.append(("culprits", "count", "planted culprits"))
    panels = [p for p in panels if any(c["cell"]["sweep"] == p[0] for c in run["cells"])]
    if not panels:
        return False
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False)
    for axis, (sweep, key, label) in zip(axes[0], panels, strict=True):
        cells = [c for c in run["cells"] if c["cell"]["sweep"] == sweep and c["spikes"]]
        first = cells[0]["cell"]["scenario"] if cells else ""
        cells = [c for c in cells if c["cell"]["scenario"] == first]
        for name in strategies_of(cells):
            points = [(c["cell"][key], c["strategies"].get(name)) for c in cells]
            points = sorted((x, f["cost_f"]) for x, f in points if f is not None)
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        if sweep == "tokens":
            axis.set_xscale("log", base=2)
        axis.set(xlabel=label, ylabel="cost in f", title=first)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return True


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


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)
