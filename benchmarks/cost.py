# SPDX-License-Identifier: Apache-2.0
"""What `auto` costs now against 0.1.0, cell by cell, from a record of the battery.

    python -m benchmarks.localize --full --sweep battery --sweep masters --strategy auto
    python -m benchmarks.cost runs/benchmarks/localize/localize.json

Prints a table, and writes cost.json where --out says. 0.1.0's costs are those of benchmarks/results/battery.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.localization.tables import holders_of
from benchmarks.run import REPO

BEFORE = REPO / "benchmarks" / "results" / "battery.json"
COMMIT = "d11ce98"
MORE = 3
"""f that each micro-batch with a culprit may cost more than then."""


def compare(run: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """One row for each cell that spikes.

    Args:
        run: what ``benchmarks.localize`` wrote.
        before: likewise, of 0.1.0; cells that it lacks have no limit.
    """
    then = {_key(cell): cell["strategies"]["auto"]["cost_f"] for cell in before["cells"]}
    rows = []
    for cell in run["cells"]:
        found = cell["strategies"]["auto"]
        named = {key: cell["cell"][key] for key in ("scenario", "dtype", "masters", "seed")}
        told = {key: found[key] for key in ("recall", "false_positives", "verdict", "closure")}
        counts = {"holders": len(holders_of(cell)), "before_f": then.get(_key(cell)), "now_f": found["cost_f"]}
        rows.append({**named, **counts, **told})
    return {"before": COMMIT, "command": run["command"], "core_sha256": run["core_sha256"], "rows": rows}


def is_over(row: dict[str, Any]) -> bool:
    """Whether the cell costs more than it may."""
    return row["before_f"] is not None and row["now_f"] > row["before_f"] + MORE * row["holders"]


def markdown(found: dict[str, Any]) -> str:
    """A table: a line for each scenario and precision, a number for each seed."""
    lines = [
        "| scenario | computed in | weights in | culprits' micro-batches | 0.1.0 (f) | now (f) | recall | closure |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["masters"], row["dtype"], row["scenario"]), []).append(row)
    for (masters, dtype, scenario), rows in sorted(groups.items(), key=lambda item: item[0][:2], reverse=True):
        then = [row["before_f"] for row in rows if row["before_f"] is not None]
        closures = [row["closure"] for row in rows]
        recall = sum(row["recall"] for row in rows) / len(rows)
        cells = [scenario, dtype, masters, _list(row["holders"] for row in rows), _list(then) or "-"]
        cells += [_list(row["now_f"] for row in rows), f"{recall:.2f}", f"{min(closures):.3f} to {max(closures):.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _key(cell: dict[str, Any]) -> tuple:
    where = cell["cell"]
    return where["scenario"], where["dtype"], where.get("masters", "float32"), where["seed"], where["tokens"]


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit code is 1 where a cell costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="localize.json")
    parser.add_argument("--out", type=Path, help="a folder for cost.json")
    parsed = parser.parse_args(arguments)
    found = compare(json.loads(parsed.run.read_text()), json.loads(BEFORE.read_text()))
    print(markdown(found))
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
        (parsed.out / "cost.json").write_text(json.dumps(found, indent=1) + "\n")
    over = [row for row in found["rows"] if is_over(row)]
    for row in over:
        print(f"over its limit: {row}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
