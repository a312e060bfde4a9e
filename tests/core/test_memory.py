# SPDX-License-Identifier: Apache-2.0
"""A search takes no more memory than was forecast, goes the cheapest way that fits, and gives all of its room back."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gradloc.core import gradients, memory, memory_plans
from gradloc.core.gradients import GradientSpace, in_parts
from gradloc.core.memory import SearchMemory, StepPeak, idle_bytes
from gradloc.core.memory_plans import PLANS, Memory, MemoryNeed
from gradloc.core.ranks import Ranks
from gradloc.search.find import localize
from gradloc.search.weights import MovedWeights
from gradloc.trigger import Spike
from tests.toy_model import ToyStep, build, random_batch

GIB = 2**30
NEED = MemoryNeed(shards=4 * GIB, largest=2**20, state=8 * GIB, micro_batch=6 * GIB, forward=2 * GIB)


def peak_of(work) -> int:
    """What this process allocates on the CPU at most while it works, in bytes, as torch's profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=["on the device", "without the optimizer", "on the host", "bisection"])
def test_a_search_takes_what_was_forecast_and_no_more(plan, dtype):
    model = build("S")
    batch = random_batch(model).planted({(3, 5): 1e4})
    step, space = ToyStep(model, batch, 2), GradientSpace(model)
    step.train()
    training = peak_of(lambda: (space.clear(), step.train())) - space_bytes(space)  # what a micro-batch takes
    step.dtype = dtype
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
    room = SearchMemory(space, optimizer, training, step.forward_bytes())
    norm = space.norm()
    spike = Spike("fixed", norm, norm / 100, norm, batch.num_tokens)

    def search() -> None:
        strategy = "auto" if plan.is_full else "bisect"
        found = localize(step, space, Ranks(), spike, 1.0, strategy=strategy, max_steps=20)
        assert found.culprits

    on_host = (room.need.state if plan.moves_optimizer else 0) + 3 * room.need.shards * plan.keeps_on_host
    taken = peak_of(lambda: (room.make(plan), search(), room.close()))
    told = room.need.peak_bytes(plan) + (room.need.state if plan.moves_optimizer else 0)
    print(f"{taken / 2**20:.1f} MiB with {on_host / 2**20:.1f} on the host, {told / 2**20:.1f} were forecast")
    assert 0.3 * told < taken <= told + on_host, "a CPU's memory is the host's, too"


def space_bytes(space: GradientSpace) -> int:
    return sum(param.numel() * param.element_size() for param in space.params)


def test_moving_weights_takes_so_many_bytes_for_each_element_of_a_part(monkeypatch):
    monkeypatch.setattr(gradients, "HOST_PART", 2**18)
    model = torch.nn.Linear(2**10, 2**10, bias=False)  # four parts
    space = GradientSpace(model)
    direction = [torch.randn_like(param).bfloat16() for param in model.parameters()]
    with MovedWeights(space, torch.bfloat16) as weights:
        taken = peak_of(lambda: weights.move(direction, 1e-3)) / 2**18
    print(f"{taken:.1f} bytes an element")
    assert memory_plans.SCRATCH_BYTES / 2 < taken <= memory_plans.SCRATCH_BYTES


@pytest.mark.parametrize(
    ("available", "number"),
    [
        (20 * GIB, 0),  # three copies and a micro-batch
        (18 * GIB, 1),
        (11 * GIB, 1),  # less what the optimizer's state gives
        (9 * GIB, 2),  # one copy, .grad
        (3 * GIB, 2),
        (2 * GIB, 3 if NEED.peak_bytes(PLANS[3]) < 2 * GIB else 4),
    ],
)
def test_the_cheapest_way_that_fits_is_taken(available, number):
    assert NEED.cheapest_plan(Memory(available)) == number


def test_a_way_that_needs_more_of_the_host_than_there_is_is_not_taken():
    need = replace(NEED, pinned_state=8 * GIB, pinned_copies=16 * GIB)
    for host, number in ((math.inf, 2), (26 * GIB, 2), (25 * GIB, len(PLANS))):  # 24 GiB are 95 % of 25.3
        assert need.cheapest_plan(Memory(free=9 * GIB, host=host)) == number
    assert need.cheapest_plan(Memory(free=18 * GIB, host=7 * GIB)) == len(PLANS)
    assert need.cheapest_plan(Memory(free=20 * GIB, host=0)) == 0, "the first needs none"
    said = need.refusal(Memory(free=18 * GIB, host=7 * GIB), "cuda:3")
    assert "8.42 GiB of the host's memory" in said and "7.00 GiB are free" in said and "fewer processes" in said


def limits(most, now, stat="anon 1", at=""):
    """Return a control group's files of memory, of version 2, or of version 1 below ``memory/``."""
    names = ("limit_in_bytes", "usage_in_bytes") if at.startswith("memory/") else ("max", "current")
    return dict(zip((f"{at}memory.{name}" for name in (*names, "stat")), (most, now, stat), strict=True))


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (limits("1000", "700", "anon 1\ninactive_file 200"), 500),
        (limits("1000", "700"), 300),
        (limits("max", "700"), math.inf),
        (limits("1000", "900", "inactive_file 1\ntotal_inactive_file 50", at="memory/"), 150),
        ({}, math.inf),
        (
            {"own": "0::/slurm/job_7/step_0"}
            | limits("9000", "100")
            | limits("2000", "1900", "inactive_file 30", at="slurm/job_7/")
            | limits("max", "1900", at="slurm/job_7/step_0/"),
            130,
        ),
        (
            {"own": "4:cpu,cpuacct:/\n3:memory:/child\n0::/"}
            | limits("9000", "100", at="memory/")
            | limits("700", "100", at="memory/child/"),
            600,
        ),
    ],
)
def test_the_least_limit_on_the_way_to_this_process_counts(files, free, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text + "\n")
    assert memory.cgroup_free(str(tmp_path), str(tmp_path / "own")) == free
    monkeypatch.setattr(memory, "cgroup_free", lambda: free)
    assert memory.memory_of(torch.device("cpu")).free <= free


def test_sums_in_float64_copy_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(gradients, "HOST_PART", 2**16)
    values = torch.randn(2**20)
    torch.testing.assert_close(gradients.totals_of([values])[0], values.double().sum())
    torch.testing.assert_close(gradients.totals_of([values], are_absolute=True)[0], values.double().abs().sum())
    taken = peak_of(lambda: gradients.totals_of([values], are_absolute=True))
    assert taken < 3 * 2**19, "two parts of 1/16, eight bytes an element"


def test_what_a_host_has_left_is_read_without_a_package(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  3 kB\nHugePages_Total: 0\n")
    assert memory.host_free(str(tmp_path / "meminfo")) == 3072
    assert memory.host_free(str(tmp_path / "none")) == math.inf
    assert 2**28 < memory.host_free() < 2**60


def test_a_refusal_names_what_is_lacking_and_its_advice_helps():
    there = Memory(free=2 * GIB)
    need = MemoryNeed(shards=4 * GIB, largest=1, state=2 * GIB, micro_batch=6 * GIB, forward=0)
    assert need.cheapest_plan(there) == len(PLANS)
    said = need.refusal(there, "cuda:3")
    assert "6.42 GiB more than the 2.00 GiB" in said and "on cuda:3" in said and "one takes 6.00 GiB" in said
    smaller = MemoryNeed(shards=4 * GIB, largest=1, state=2 * GIB, micro_batch=2 * GIB, forward=0)
    left = Memory(free=there.free + 4 * GIB)  # training's own peak is as much lower
    assert smaller.cheapest_plan(left) < len(PLANS)
    over_more = MemoryNeed(shards=2 * GIB, largest=1, state=GIB, micro_batch=6 * GIB, forward=0)
    left = Memory(free=there.free + 4 * 2 * GIB)  # weights, gradient and the optimizer's two, halved
    assert over_more.cheapest_plan(left) < len(PLANS)


@pytest.mark.parametrize(("micro_batch", "forward"), [(9_000, 2_000), (2_000, 9_000)])
@pytest.mark.parametrize("block", [500, 10**6])
def test_what_the_next_pass_takes_is_taken_before_it_and_given_back(micro_batch, forward, block, monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK", block)
    space = GradientSpace(torch.nn.Linear(20, 10, bias=False))
    room = SearchMemory(space, None, micro_batch, forward)
    taken = [peak_of(room.make_sure)]
    space.params[0].grad = torch.zeros_like(space.params[0])
    taken.append(peak_of(room.make_sure))
    assert taken == [9_000 + 800, 9_000], "and its gradients, where there are none yet"


def test_of_the_optimizer_s_state_what_has_its_memory_for_itself_is_moved():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    whole = torch.zeros(2, 32)
    optimizer.state[model.weight] = {
        "step": torch.tensor(1.0),
        "alone": torch.zeros(4, 8),
        "part": whole[0],
        "name": "x",
    }
    assert SearchMemory(GradientSpace(model), optimizer, 0, 0).need.state == 4 * 8 * 4
    assert SearchMemory(GradientSpace(model), None, 0, 0).need.state == 0


def test_what_a_sleeping_rollout_holds_is_not_to_be_had():
    segments = [
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 30},
        {"device": 1, "segment_pool_id": (0, 7), "total_size": 5000, "allocated_size": 0},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 900, "allocated_size": 0},
        {"device": 1, "total_size": 8, "allocated_size": 8},
    ]
    assert idle_bytes(segments, 1) == 70


@pytest.mark.parametrize("has_traces", [True, False])
def test_a_history_of_allocations_that_somebody_records_is_not_read(monkeypatch, has_traces):
    segments = [{"device": 0, "total_size": 100, "allocated_size": 30}]

    def with_traces(include_traces=True):
        assert not include_traces
        return segments

    card = SimpleNamespace(memory_snapshot=with_traces if has_traces else lambda: segments)
    card.mem_get_info = lambda device: (5, 100)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: card)
    assert memory.memory_of(torch.device("cuda:0")).free == 5 + 70


def test_the_peak_of_another_pass_is_not_the_step_s(monkeypatch):
    there = {"peak": 900, "now": 100}
    monkeypatch.setattr(memory, "peak_of", lambda device: (there["peak"], there["now"]))
    monkeypatch.setattr(memory, "reset_peak", lambda device: there.update(peak=there["now"]))
    peak, device = StepPeak(), torch.device("cpu")
    for other, step, now, size in ((900, 350, 100, 250), (900, 700, 100, 600), (1200, 500, 100, 600)):
        there["peak"] = max(there["peak"], other)  # the log-probs' pass, always larger than the step
        peak.begin(device)
        assert there["peak"] == there["now"]
        there.update(peak=step, now=now)
        peak.end(device)
        assert peak.size == size
    assert peak.most(device) == (1200, 0), "what the trainer reports is not forgotten"


def test_shards_on_the_host_need_room_there_and_none_on_the_device(monkeypatch):
    card = torch.device("meta")
    monkeypatch.setattr(GradientSpace, "device", card)
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(free=GIB if device == card else 64 * GIB))
    monkeypatch.setattr(GradientSpace, "reshard", lambda space: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as verl sets it,
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "4")  # and Ray
    model = torch.nn.Linear(64, 64)
    room = SearchMemory(GradientSpace(model), torch.optim.AdamW(model.parameters()), GIB // 2, 0)
    there, size = room.memory(), 4 * 65 * 64
    assert (there.free, there.host) == (GIB, 16 * GIB)
    assert room.need.shards == room.need.state == room.need.largest == 0 and room.need.host == 3 * size
    assert room.need.cheapest_plan(there) == 0
    room.make_sure()
    lacking = replace(room.need, host=19 * GIB)
    assert lacking.cheapest_plan(there) == len(PLANS)
    assert "20.00 GiB of the host's memory for each process, and 16.00 GiB are free" in lacking.refusal(there, card)


@pytest.mark.parametrize("plan", PLANS[1:], ids=lambda plan: "on the host" if plan.keeps_on_host else "the optimizer's")
def test_what_is_moved_to_the_host_comes_back_bit_for_bit_and_so_it_does_after_a_failure(plan, monkeypatch):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    before = [value.clone() for value in held]
    space = GradientSpace(model)
    room = SearchMemory(space, optimizer, 0, 0)
    assert room.need.state == 2 * room.need.shards
    room.make(plan)
    assert sum(value.untyped_storage().nbytes() for value in held if value.dim()) == 0
    assert space.room is room and space.keeps_on_host == plan.keeps_on_host
    room.close()
    assert all(torch.equal(value, old) for value, old in zip(held, before, strict=True))
    copies = iter([memory.host_copy])
    monkeypatch.setattr(memory, "host_copy", lambda tensor: next(copies)(tensor))  # there is no memory for the second
    with pytest.raises(StopIteration):
        room.make(plan)
    room.close()
    assert all(torch.equal(value, old) for value, old in zip(held, before, strict=True))
    assert not space.keeps_on_host and space.room is None


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_parts_are_runs_of_the_same_elements(monkeypatch, is_contiguous):
    monkeypatch.setattr(gradients, "HOST_PART", 10)
    left = torch.arange(35.0).view(5, 7)
    left = left if is_contiguous else left.T
    parts = list(in_parts(left, left + 100))
    assert all(torch.equal(a + 100, b) for a, b in parts)
    assert math.fsum(float(a.sum()) for a, _ in parts) == float(left.sum())
    assert len(parts) == (4 if is_contiguous else 1)


def test_norms_in_parts_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(gradients, "HOST_PART", 100)
    monkeypatch.setattr(gradients, "_ROW", 32)  # of 561 weights the last are no whole row
    module = torch.nn.Linear(33, 17)
    module(torch.randn(5, 33)).square().sum().backward()
    squares = [param.grad.double().square().sum() for param in module.parameters()]
    torch.testing.assert_close(GradientSpace(module).squares(), torch.stack(squares))
