# SPDX-License-Identifier: Apache-2.0
"""What `auto` costs, cell by cell, from a record of the battery.

    python -m lab.benchmarks.localize --full --sweep battery --sweep masters --strategy auto
    python -m lab.benchmarks.localization.cost runs/benchmarks/localize/localize.json

Writes cost.json and cost.md.
"""

import json
import sys
from pathlib import Path

from lab.benchmarks.localization.tables import holders_of
from lab.benchmarks.run import Record, finish, parser, table

HEAD = ["scenario", "computed in", "weights in", "culprits' micro-batches", "cost (f)", "recall", "closure"]


def summary(run: Record) -> Record:
    """One row for each cell that spikes.

    Args:
        run: what ``lab.benchmarks.localize`` wrote.
    """
    rows = []
    for cell in run["cells"]:
        auto = cell["strategies"]["auto"]
        named = {key: cell["cell"][key] for key in ("scenario", "dtype", "masters", "seed")}
        told = {key: auto[key] for key in ("cost_f", "recall", "false_positives", "verdict", "closure")}
        rows.append({**named, "holders": len(holders_of(cell)), **told})
    return {"command": run["command"], "core_sha256": run["core_sha256"], "rows": rows}


def markdown(record: Record) -> str:
    """A table: a line for each scenario and precision, a number for each seed."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for row in record["rows"]:
        groups.setdefault((row["masters"], row["dtype"], row["scenario"]), []).append(row)
    lines = [HEAD]
    for (masters, dtype, scenario), rows in sorted(groups.items(), key=lambda item: item[0][:2], reverse=True):
        closures = [row["closure"] for row in rows]
        recall = sum(row["recall"] for row in rows) / len(rows)
        holders, costs = (", ".join(str(row[key]) for row in rows) for key in ("holders", "cost_f"))
        bounds = f"{min(closures):.3f} to {max(closures):.3f}"
        lines.append([scenario, dtype, masters, holders, costs, f"{recall:.2f}", bounds])
    return table(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    options = parser("localization.cost", __doc__)
    options.add_argument("run", type=Path, help="localize.json")
    parsed = options.parse_args(arguments)
    record = summary(json.loads(parsed.run.read_text()))
    finish(record, parsed.out, "cost", markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
