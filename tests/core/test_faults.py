# SPDX-License-Identifier: Apache-2.0
"""An error inside the search's forwards and backwards: training goes on as if nobody had looked, or ends at once."""

import random
import time
from collections import Counter

import pytest

from gradloc.core.memory_plans import PLANS
from tests.toy_model.faults import PLACES
from tests.world import RankError, World

pytestmark = pytest.mark.full


def check(by_rank: list[list[dict]], least: int, mode: str = "observe") -> None:
    """Of each rank: training alone, then failures at pass 1, 2, ... and at last a search that had no more passes."""
    for plain, *failed, last in by_rank:
        assert len(failed) >= least
        assert all(answer["weights"] == plain["weights"] for answer in failed)
        assert all((answer["failures"], answer["events"]) == (1, 0) for answer in failed)
        assert (last["failures"], last["events"]) == (0, 1)
        assert (last["weights"] == plain["weights"]) == (mode == "observe"), "a step that failed is taken as it was"


ALL = [0, 1]
CASES = [("fsdp1", "backward", ALL, "mask")]
MORE = [(layout, place, ALL, "observe") for layout in ("fsdp2", "fsdp1") for place in PLACES]
MORE += [("fsdp2", "backward", ALL, "mask")]
MORE += [
    (layout, "loss", [1], "observe") for layout in ("fsdp2", "fsdp1")
]  # its peers wait in no collective of the pass


@pytest.mark.parametrize(
    ("layout", "place", "failing", "mode"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in CASES)],
)
def test_an_error_is_counted_and_training_goes_on_with_the_same_weights(bare_world, layout, place, failing, mode):
    options = {"layout": layout, "place": place, "failing": failing, "mode": mode}
    check(bare_world.run("tests.toy_model.faults.train_past_every_pass", **options), 3, mode)


@pytest.mark.parametrize("place", [pytest.param("block", marks=pytest.mark.slow), "backward"])
def test_an_error_of_one_rank_in_the_middle_of_a_pass_ends_all_ranks_at_once(place):
    with World(2, preloaded=()) as doomed:
        doomed.run("tests.toy_model.faults.train", layout="fsdp2")
        started = time.monotonic()
        with pytest.raises(RankError, match="was lost"):
            doomed.run(
                "tests.toy_model.faults.train", layout="fsdp2", place=place, number=2, failing=[1], patience_s=2.0
            )
        assert time.monotonic() - started < 300, "no time-out of a collective was waited for"


@pytest.mark.slow
def test_four_ranks_recover_together_and_end_together():
    with World(4, preloaded=()) as four:
        for place, failing in (*((place, [0, 1, 2, 3]) for place in PLACES), ("loss", [1, 2])):
            options = {"layout": "fsdp2", "place": place, "failing": failing}
            check(four.run("tests.toy_model.faults.train_past_every_pass", timeout_s=3600, **options), 3)
        with pytest.raises(RankError, match="was lost"):
            options = {"place": "block", "number": 3, "failing": [1, 2, 3], "patience_s": 2.0}
            four.run("tests.toy_model.faults.train", layout="fsdp2", **options)


def test_ranks_that_failed_at_different_collectives_are_not_taken_to_have_failed_together(bare_world):
    assert bare_world.run("tests.toy_model.faults.fail_apart") == ["LostRank", "LostRank"]


def shortages(size: int, count: int, seed: int) -> list[dict]:
    """Options of :func:`tests.toy_model.faults.train_on_card`: any one rank, at any allocation or before the first."""
    draw, found = random.Random(seed), []
    for number in range(count):
        place = {"room": draw.uniform(0.0, 1.1)} if number % 4 == 3 else {"at": draw.random() ** 2}
        mode = "mask" if number % 5 == 4 else "observe"
        layout, dtype = draw.choice(["fsdp2", "fsdp1"]), draw.choice(["float32", "bfloat16"])
        found.append({"failing": draw.randrange(size), "layout": layout, "dtype": dtype, "mode": mode, **place})
    return found


def run_out_of_memory(world: World, size: int, count: int, seed: int) -> None:
    """None ends the run or hangs; a step whose search did not end well is the one without gradloc, bit for bit."""
    outcomes: Counter[str] = Counter()
    for options in shortages(size, count, seed):
        answers = world.run(
            "tests.toy_model.faults.train_on_card", timeout_s=300, **options
        )  # three trainings; none hangs
        assert len({(answer["failures"], answer["events"]) for answer in answers}) == 1, "all ranks know of it"
        failures, events = answers[0]["failures"], answers[0]["events"]
        num_errors = sum(answer["errors"] for answer in answers)
        is_refused = max(answer["way"] for answer in answers) == len(PLANS)
        assert (failures, events) == ((1, 0) if num_errors else (0, 0) if is_refused else (0, 1)), options
        if not events or options["mode"] == "observe":
            assert all(answer["weights"] == answer["plain"] for answer in answers), options
        outcomes["error" if num_errors else "refused" if is_refused else "searched in what it had taken"] += 1
    print(f"{size} ranks, seed {seed}: {dict(outcomes)}")
    assert outcomes["error"] > count / 8 and outcomes["refused"] > 0


def test_a_rank_that_runs_out_of_memory_at_any_allocation_ends_no_run(bare_world):
    run_out_of_memory(bare_world, 2, 4, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seed"), [(2, 1), (4, 2)])
def test_so_it_is_two_hundred_times_on_two_and_on_four_ranks(size, seed):
    with World(size, preloaded=()) as world:
        run_out_of_memory(world, size, 100, seed)
