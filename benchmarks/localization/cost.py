# SPDX-License-Identifier: Apache-2.0
"""What `auto` costs, cell by cell, from a record of the battery.

    python -m benchmarks.localize --full --sweep battery --sweep masters --strategy auto
    python -m benchmarks.localization.cost runs/benchmarks/localize/localize.json

Prints a table, and writes cost.json where --out says.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.localization.tables import holders_of


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """One row for each cell that spikes.

    Args:
        run: what ``benchmarks.localize`` wrote.
    """
    rows = []
    for cell in run["cells"]:
        found = cell["strategies"]["auto"]
        named = {key: cell["cell"][key] for key in ("scenario", "dtype", "masters", "seed")}
        told = {key: found[key] for key in ("cost_f", "recall", "false_positives", "verdict", "closure")}
        rows.append({**named, "holders": len(holders_of(cell)), **told})
    return {"command": run["command"], "core_sha256": run["core_sha256"], "rows": rows}


def markdown(found: dict[str, Any]) -> str:
    """A table: a line for each scenario and precision, a number for each seed."""
    lines = [
        "| scenario | computed in | weights in | culprits' micro-batches | cost (f) | recall | closure |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["masters"], row["dtype"], row["scenario"]), []).append(row)
    for (masters, dtype, scenario), rows in sorted(groups.items(), key=lambda item: item[0][:2], reverse=True):
        closures = [row["closure"] for row in rows]
        recall = sum(row["recall"] for row in rows) / len(rows)
        cells = [scenario, dtype, masters, _list(row["holders"] for row in rows), _list(row["cost_f"] for row in rows)]
        cells += [f"{recall:.2f}", f"{min(closures):.3f} to {max(closures):.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.localization.cost", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="localize.json")
    parser.add_argument("--out", type=Path, help="a folder for cost.json")
    parsed = parser.parse_args(arguments)
    found = summary(json.loads(parsed.run.read_text()))
    print(markdown(found))
    if parsed.out:
        parsed.out.mkdir(parents=True, exist_ok=True)
        (parsed.out / "cost.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
