# SPDX-License-Identifier: Apache-2.0
"""Ask every tool about every spike of the collection, and score the answers alike: docs/peers.md has the table.

    python -m lab.benchmarks.spikes                          # two fresh seeds of each kind and model
    python -m lab.benchmarks.spikes --seeds 1 --kind token --tool GradLoc --tool trainscope

A run that was stopped goes on with ``--resume``. Packages that are not installed are left out, and the record says so:
``pip install -r requirements/peers.txt`` into an environment of its own. Writes spikes.json.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from lab.benchmarks.run import Parser, about, finish, in_processes, seeds_of, write
from lab.benchmarks.spikes.collection import KINDS, models_of
from lab.benchmarks.spikes.natural import NATURAL
from lab.benchmarks.spikes.scoring import measure, picture, report
from lab.benchmarks.spikes.tools import TOOLS


def main() -> int:
    made = Parser("spikes", __doc__)
    made.add_seeds(2, "fresh seeds of each planted kind and model; twice of natural ones")
    made.add_argument("--kind", choices=[*KINDS, *NATURAL], action="append")
    made.add_argument("--tool", choices=TOOLS, action="append")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--resume", action="store_true", help="keep the spikes that the record in --out has")
    made.add_argument("--picture", type=Path, help="draw the record in --out as a chart, and end")
    args = made.parse_args()
    if args.picture:
        picture(json.loads((args.out / "spikes.json").read_text(encoding="utf-8"))["rows"], args.picture)
        return 0
    versions = {name: TOOLS[name].version() for name in args.tool or TOOLS}
    settings = {name: TOOLS[name].settings for name in versions if TOOLS[name].settings}
    tools = [name for name, version in versions.items() if version != "absent"]
    path, rows = args.out / "spikes.json", []
    if args.resume and path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    done = Counter((row["kind"], row["model"]) for row in rows)
    cells = [
        (kind, model, seed, tools)
        for kind in args.kind or [*KINDS, *NATURAL]
        for model in models_of(kind)
        for seed in seeds_of(args, 1 + (kind in NATURAL))[done[kind, model] :]
    ]
    record = {"versions": versions, "settings": settings, "rows": rows}
    for found in in_processes(measure, cells, args.processes):
        rows.append(found)
        write({**about(args), **record}, args.out, "spikes")
    order = [*KINDS, *NATURAL]
    rows.sort(key=lambda row: (order.index(row["kind"]), row["model"], row["seed"]))
    finish(args, record, report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
