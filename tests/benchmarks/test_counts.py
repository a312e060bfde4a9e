# SPDX-License-Identifier: Apache-2.0
"""The counter counts operations, reads and collectives, and an update with gradloc stays within its limits."""

import pytest
import torch

from lab.benchmarks import counts
from lab.benchmarks.counter import DeviceCounter


def test_operations_and_reads_are_counted_where_a_gpu_would_have_them():
    with torch.no_grad(), DeviceCounter() as counter:
        x = torch.ones(4, 8, device="cpu")  # said to be there: the device's
        y = (x @ x.T).sum()
        float(y)
        x[x > 0].tolist()
    assert sum(counter.ops.values()) == 7  # ones, t, mm, sum, the number, a comparison, what it selects
    assert counter.reads[""] == 3, "a number, how many a mask selects, and these"
    assert counter.bytes[""] > 4 * 8 * 4 * 2


def test_what_has_been_copied_to_the_host_is_read_for_nothing():
    with torch.no_grad(), DeviceCounter() as counter:
        host = torch.ones(6, device="cpu").cpu()
        before = sum(counter.ops.values())
        assert float(host.cumsum(0)[host > 0].max()) == 6.0
        torch.tensor([1.0, 2.0]).tolist()
    assert counter.reads[""] == 1 and sum(counter.ops.values()) == before == 1
    with DeviceCounter() as counter:
        moved = torch.tensor([1.0]).to("cpu")
        moved.item()
    assert counter.reads[""] == 1, "what has been moved to the device is not the host's any more"


def test_phases_are_counted_apart():
    with DeviceCounter() as counter:
        with counter.within("pass"), counter.within("sent"):
            torch.ones(2, device="cpu").tolist()
        torch.ones(2, device="cpu").tolist()
    assert counter.reads == {"pass": 1, "": 1}


@pytest.mark.slow
def test_an_update_of_verl_s_actor_stays_within_the_limits(world, unpatched_world, tmp_path):
    check({"unpatched": unpatched_world, "on": world}, tmp_path)


def check(worlds, tmp_path):
    """Count updates in these worlds; the table goes to the output."""
    run = counts.measure(worlds, tmp_path)
    print(counts.markdown(run))
    assert counts.broken(run) == []
    spiking = run["updates"]["spiking, on"]
    assert spiking["reads_in_passes"] > 0 and spiking["reads_in_losses"] > 0, "a search, and a look at its cures"
    greedy = {**run, "updates": {**run["updates"], "healthy, on": run["updates"]["spiking, on"]}}
    assert len(counts.broken(greedy)) >= 3, "a limit can be broken"
