# SPDX-License-Identifier: Apache-2.0
"""Every tool's answer to every spike of the collection, scored alike: docs/peers.md has the table.

    python -m lab.benchmarks.spikes                          # two fresh seeds of each kind and model
    python -m lab.benchmarks.spikes --seeds 1 --kind token --tool GradLoc --tool trainscope

A run that was stopped goes on with ``--resume``. Packages that are not installed are left out, and the record says so:
``pip install -r requirements/peers.txt`` into an environment of its own. Writes spikes.json.
"""

import itertools
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Sequence

from lab.benchmarks.run import Progress, Record, as_typed, digest, finish, parser, table, write
from lab.benchmarks.spikes.collection import KINDS, TIMES, models_of
from lab.benchmarks.spikes.scoring import measured
from lab.benchmarks.spikes.tools import TOOLS


def tables(rows: list[Record], tools: Sequence[str]) -> str:
    """Return the comparison over all spikes, and the right places by kind, as Markdown."""
    spikes = [row for row in rows if row["spike"] is not None]
    lines: list[Sequence[object]] = [
        ("tool", "noticed", "right link", "right place", "accused innocents", "healthy step")
    ]
    for name in tools:
        found = [row["answers"][name] for row in spikes]
        counts = [sum(each[column] for each in found) for column in ("noticed", "link", "place", "innocent")]
        prices = [each["price"] for each in found if "price" in each]
        price = f"{statistics.median(prices):+.0%}" if prices else ""
        lines.append((name, *(f"{count} of {len(found)}" for count in counts), price))
    kinds: list[Sequence[object]] = [("right place", *tools)]
    for kind in KINDS:
        of_kind = [row for row in spikes if row["kind"] == kind]
        if of_kind:
            hits = [sum(row["answers"][name]["place"] for row in of_kind) for name in tools]
            kinds.append((f"{kind} ({len(of_kind)})", *hits))
    quiet = len(rows) - len(spikes)
    note = f"{len(spikes)} spikes; {quiet} more runs with a fault had no norm {TIMES:g} times the usual one."
    return "\n\n".join((table(lines), table(kinds), note))


def main() -> int:
    made = parser("spikes", __doc__)
    made.add_argument("--seeds", type=int, default=2, help="fresh seeds of each kind and model")
    made.add_argument("--seed", type=int, action="append", help="these seeds instead")
    made.add_argument("--kind", choices=KINDS, action="append")
    made.add_argument("--tool", choices=TOOLS, action="append")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--resume", action="store_true", help="keep the spikes that the record in --out has")
    args = made.parse_args()
    versions = {name: TOOLS[name].version() for name in args.tool or TOOLS}
    tools = [name for name, version in versions.items() if version != "absent"]
    path, rows = args.out / "spikes.json", []
    if args.resume and path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    done = {(row["kind"], row["model"]) for row in rows}
    fresh = random.SystemRandom()
    cells = [
        (kind, model, seed, tools)
        for kind in args.kind or KINDS
        for model in models_of(kind)
        if (kind, model) not in done
        for seed in (args.seed or [fresh.randrange(2**30) for _ in range(args.seeds)])
    ]
    record = {"command": as_typed("spikes"), "sources": digest(), "versions": versions}
    progress = Progress(max(len(cells), 1))
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for found in pool.imap_unordered(measured, cells):
            rows.append(found)
            write({**record, "rows": rows}, args.out, "spikes")
            progress.step(f"{found['kind']} {found['model']} {found['seed']}")
    order = list(itertools.chain(KINDS))
    rows.sort(key=lambda row: (order.index(row["kind"]), row["model"], row["seed"]))
    finish({**record, "rows": rows}, args.out, "spikes", tables(rows, tools))
    return 0


if __name__ == "__main__":
    sys.exit(main())
