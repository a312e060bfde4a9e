# SPDX-License-Identifier: Apache-2.0
"""Planted tokens are named, certified and masked whatever the loss, the clip and the precision."""

import pytest

from tests.watch import losses
from tests.watch.kinds import Kind
from tests.watch.test_kinds import check, check_alone

QUICK = ("Loss", "ClippedByGroup", "DistilledKept", "Valued")
SLOW = ("Tied", "Ppo")
"""These are run on two ranks, or as part of another loss."""
NAMES = [name for name, kind in vars(losses).items() if isinstance(kind, type) and issubclass(kind, losses.Loss)]
ALONE = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in SLOW else pytest.mark.full)
    for name in NAMES
]
DEFAULT = (("ddp", "ClippedByGroup"), ("fsdp2", "PpoFar"), ("fsdp1", "Tied"), ("fsdp1", "ClippedByLargest"))
LAYERED = ("Loss", "PpoFar", "Smoothed", "Tied", "ClippedByGroup", "ClippedByLargest", "Bfloat16Weights", "Valued")
ON_RANKS = [
    pytest.param(layout, name, marks=pytest.mark.full if (layout, name) in DEFAULT else pytest.mark.slow)
    for layout in losses.LAYOUTS
    for name in LAYERED
    if (layout, name) != ("fsdp1", "ClippedByGroup")  # it has one clip for all
]


@pytest.mark.parametrize("name", ALONE)
def test_a_loss(tmp_path, name):
    check_alone(getattr(losses, name), tmp_path)


def run(layout: str, name: str, **given: object) -> dict:
    return losses.in_layout(layout, name)(**given).run().result()


@pytest.mark.parametrize(("layout", "name"), ON_RANKS)
def test_a_loss_on_two_ranks(bare_world, tmp_path, layout, name):
    kind: type[Kind] = getattr(losses, name)

    def on_ranks(**given):
        return bare_world.run("tests.watch.test_losses.run", layout=layout, name=name, **given)

    check(kind, on_ranks, tmp_path)
