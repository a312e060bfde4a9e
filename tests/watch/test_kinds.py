# SPDX-License-Identifier: Apache-2.0
"""With the one line ``gradloc.Watch(model, folder=...)`` each kind of loop trains on as it did.

Under ``observe`` weights, norms and random state are those of the run without a watch, bit for bit; under ``mask`` the
weights are those of the run in which the token has no loss. The event names the token, and nothing else.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.watch import kinds
from tests.watch.test_harmless import events_in, named
from tests.world import World

ALONE: list[Any] = [
    value
    for value in vars(kinds).values()
    if isinstance(value, type) and issubclass(value, kinds.Kind) and not issubclass(value, kinds.Ranked)
]
RANKED = [kinds.Replicated, kinds.ReplicatedOnce, kinds.ZeroOne, kinds.Sharded, kinds.ShardedOffloaded]


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_a_kind(kind, tmp_path):
    check(kind, lambda **given: [kind(**given).run().result()], tmp_path)


@pytest.mark.parametrize("kind", RANKED, ids=lambda kind: kind.__name__)
def test_a_kind_on_two_ranks(bare_world: World, kind, tmp_path):
    check(kind, lambda **given: bare_world.run("tests.watch.kinds.on_ranks", name=kind.__name__, **given), tmp_path)


def check(kind: Any, run: Any, tmp_path: Path) -> None:
    stock, without = run(), run(is_planted=False)
    observed = run(folder=str(tmp_path / "observe"))
    masked = run(folder=str(tmp_path / "mask"), action="mask")
    problems = []
    for ours, other, name in ((observed, stock, "observe"), (masked, without, "mask")):
        for rank in range(len(stock)):
            problems += [f"{name}: {each}" for each in differing(ours[rank], other[rank])]
            if name == "observe" and ours[rank]["norms"] != other[rank]["norms"]:
                problems.append(f"norms {ours[rank]['norms']} {other[rank]['norms']}")
        events = events_in(tmp_path / name)
        problems += [f"{name}: {len(events)} events"] * (len(events) != 1)
        for event in events:
            if (
                named(event) != [getattr(kind, "plant_seen", kind.plant)]
                or event["certificate"]["verdict"] != "explained"
                or event["action"]["taken"] != name
            ):
                problems.append(
                    f"{name}: named {named(event)}, {event['certificate']['verdict']} {event['certificate'].get('reason')}, {event['action']} step {event['step']['global_step']}"
                )
    if not any(not torch.equal(a, b) for a, b in zip(stock[0]["weights"].values(), without[0]["weights"].values())):
        problems.append("plant does not matter")
    assert not problems, " ;; ".join(problems)


def differing(ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    for part in ("weights", "state"):
        for name, value in ours[part].items():
            if not torch.equal(value, other[part][name]):
                off = (value.double() - other[part][name].double()).abs().max()
                found.append(f"{part} {name} off by {off:.2e}")
    return found[:4] + [f"and {len(found) - 4} more"] * (len(found) > 4)
