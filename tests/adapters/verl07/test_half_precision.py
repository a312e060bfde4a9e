# SPDX-License-Identifier: Apache-2.0
"""bfloat16 in verl's actor: everything planted is named and nothing quiet, within four updates' passes."""

import pytest

from tests.adapters.verl07.plants import KINDS

MICRO_BATCHES, MAX_STEPS = 2, 4


DEFAULT = {"mixture": "mask"}
CASES = [(kind, mode, 0) for kind, mode in DEFAULT.items()]
OTHERS = [(kind, mode, seed) for kind in KINDS for mode in ("observe", "mask") for seed in range(20)]


@pytest.mark.parametrize(
    ("kind", "mode", "seed"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in CASES)],
)
def test_all_that_is_planted_is_named_and_the_spike_explained(world, dump_dir, kind, mode, seed):
    given = {"kind": kind, "seed": seed, "mode": mode, "dtype": "bfloat16", "dump_dir": dump_dir}
    found = world.run("tests.adapters.verl07.plants.search", **given)[0]
    event = found["event"]
    search, shares, certificate = event["search"], event["shares"], event["certificate"]
    cost = search["forwards"] + 2 * search["backwards"]
    print(f"{kind} {seed} {mode}: {cost} f, closure {shares['closure']:.3f} +- {shares['closure_error']:.3f}")
    assert found["missed"] == []
    assert set(found["weak"]) <= set(found["planted"]), "nothing under a tenth of the threshold but of a planted row"
    assert certificate["verdict"] == "explained"
    assert cost <= max(3 * MICRO_BATCHES, 10) * MAX_STEPS, "an update counts as ten forwards at least"
    assert not shares["is_trusted"] or abs(shares["closure"] - 1) <= max(0.15, 3 * shares["closure_error"])
    assert event["action"]["taken"] == mode
