# SPDX-License-Identifier: Apache-2.0
"""Who speaks for which rank: a process alone, and four processes of which two hold the same sequences."""

import math
import random
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradloc.core import ranks as ranks_module
from gradloc.core.ranks import PeerFailure, Ranks


def test_a_process_alone_is_every_rank():
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.process, ranks.num_processes, ranks.is_first) == (0, 1, 0, 1, True)
    assert ranks.sum([1, 2.5]) == [1.0, 2.5] and ranks.max([0.5, -math.inf, math.nan]) == [0.5, -math.inf, math.inf]
    assert ranks.all(True) and not ranks.all(False)
    assert ranks.gather("a") == ranks.gather_first("a") == ["a"] and ranks.broadcast_from(0, "a") == "a"
    assert ranks.run_local_synced(lambda: "found") == "found"
    assert Ranks("a group")._counted is None, "every collective counts"


def test_whose_own_part_failed_is_told_with_why():
    def broken():
        raise KeyError("no such token")

    with pytest.raises(PeerFailure) as failed:
        Ranks().run_local_synced(broken)
    assert isinstance(failed.value.__cause__, KeyError) and "no such token" in str(failed.value)


def test_what_takes_long_runs_beside_meetings_of_all_ranks(monkeypatch):
    monkeypatch.setattr(ranks_module, "_LOOK_EVERY_S", 0.01)
    ranks, met = Ranks(), []
    monkeypatch.setattr(ranks, "all", lambda flag: met.append(flag) or flag)
    assert ranks.run_slowly_synced(lambda: time.sleep(0.1) or "written") == "written"
    assert len(met) > 3 and met[-1] and not any(met[:-1])
    assert ranks.run_slowly_synced(lambda: threading.current_thread().daemon), "a disk that hangs holds up no end"

    def broken():
        raise OSError("the disk is full")

    with pytest.raises(PeerFailure, match="the disk is full"):
        ranks.run_slowly_synced(broken)


@pytest.fixture
def of_four(monkeypatch):
    """The last of four processes, which send their numbers; sums and largest are those of all four."""

    def reduced(values, op=dist.ReduceOp.SUM, group=None):
        values.mul_(4) if op == dist.ReduceOp.SUM else values.add_(1)

    def gathered(values, value, group=None):
        values[:] = [(value, number) for number in range(4)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "all_reduce", reduced)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(distributed_c10d, "_get_object_coll_device", lambda group=None: "cpu")


@pytest.mark.parametrize(
    ("known", "rank", "size", "firsts"),
    [
        ({}, 3, 4, [0, 1, 2, 3]),
        ({"replicas": 2}, 1, 2, [0, 2]),
        ({"replicas": 2, "rank_of": [0, 1, 0, 1]}, 1, 2, [0, 1]),
        ({"replicas": 4}, 0, 1, [0]),
    ],
)
def test_the_first_process_of_each_rank_speaks_for_it(of_four, known, rank, size, firsts):
    ranks = Ranks(**known)
    assert (ranks.process, ranks.num_processes, ranks.rank, ranks.size, ranks.is_first) == (3, 4, rank, size, False)
    assert ranks.gather("a") == [("a", first) for first in firsts]
    assert ranks.sum([0.5]) == [2.0 / known.get("replicas", 1)], "copies count once"
    assert ranks.max([0.5, math.nan]) == [1.5, math.inf]


class Unreachable(socket.socket):
    """A server that says it listens where a queue is full: the system drops whoever connects, as a firewall does."""

    def __init__(self):
        super().__init__()
        self.listen()
        self._full = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._waiting = [socket.socket() for _ in range(8)]
        for each in self._waiting:
            each.setblocking(False)
            each.connect_ex(self._full.getsockname())

    def getsockname(self):
        return self._full.getsockname()


def a_host_group(broken: int | None, kind: str, is_made: bool) -> tuple[bool, float, int]:
    """Return whether a rank has a group of the host's, a sum over the group that it goes on with, and its threads.

    The processes' own group, of gloo, stands in for a device's. ``broken`` cannot be connected to.
    """
    is_broken = dist.get_rank() == broken
    assert ranks_module.host_group() is None, "the processes' own is of gloo"
    names = {"interface": "lo", "unknown": "no-such-interface" if is_broken else ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", names.get(kind, ""))
        patch.setattr(ranks_module, "_PATIENCE_S", 60.0 if is_made else 1.0)
        patch.setattr(distributed_c10d, "_get_object_coll_device", lambda group: None if group is None else "cpu")
        if kind == "no name" and is_broken:
            patch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
        if kind == "silent" and is_broken:
            patch.setattr(ranks_module, "_listen", lambda: [Unreachable()])
        if kind == "late" and is_broken:
            time.sleep(3)  # longer than its peer waits for an answer
        before = threading.active_count()
        made = ranks_module.host_group()
    total = torch.ones(1)
    dist.all_reduce(total, group=made)
    if made is not None:
        dist.destroy_process_group(made)
    return made is not None, float(total), threading.active_count() - before


@pytest.mark.parametrize(
    ("broken", "kind", "is_made"),
    [
        (1, "late", False),  # first: in those that follow both still count their calls alike
        (None, "", True),
        (None, "interface", True),
        (1, "no name", True),
        (0, "unknown", False),
        (1, "unknown", False),
        (0, "silent", False),
    ],
)
def test_where_gloo_cannot_connect_a_process_all_go_on_with_the_device_s_group(bare_world, broken, kind, is_made):
    """No thread is left: one that waits inside gloo may end its process with SIGABRT at exit."""
    given = {"broken": broken, "kind": kind, "is_made": is_made, "timeout_s": 120}
    assert bare_world.run("tests.core.test_ranks.a_host_group", **given) == [(is_made, 2.0, 0)] * 2


LAST_BITS = 6 * 2.0**-24
"""By how much the sums of a few float32 numbers in any two orders differ at most, relative."""


def decisions(
    values: list[list[float]], limit: float | None, is_apart: bool = False
) -> tuple[list[bool], list[float], int]:
    """Return what a rank holds of its own values, and how many of them went through the store."""
    ranks, uses = Ranks(), []
    store = ranks_module._store
    ranks_module._store = lambda: uses.append(1) or store()
    # limits that follow from the values are apart, too
    own = None if limit is None else limit * (1 + LAST_BITS * (ranks.rank if is_apart else 0))
    try:
        found = [ranks.decided(value, own) for value in values[ranks.rank]]
    finally:
        ranks_module._store = store
    return [is_over for _, is_over in found], [value for value, is_over in found if is_over], len(uses)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("limit", [0.7, 640.0, 3e18, math.inf, None])
def test_ranks_whose_values_differ_in_the_last_bits_decide_as_the_first_does(bare_world, limit, is_apart):
    rng, around = random.Random(0), 1e18 if limit in (None, math.inf) else limit
    first = [around * (1 + step / 8 * LAST_BITS) for step in range(-300, 100)]
    first += [math.inf, math.nan, 2e19, 1e15, 0.0]
    values = [first, [value * (1 + rng.uniform(-1, 1) * LAST_BITS) for value in first]]
    values[1][402] = math.inf  # whose square had no room in another order
    given = {"values": values, "limit": limit, "is_apart": is_apart, "timeout_s": 60}
    (verdicts, over, _), other = bare_world.run("tests.core.test_ranks.decisions", **given)
    assert verdicts == other[0] == [not math.isfinite(value) or value > (limit or math.inf) for value in first]
    assert [str(value) for value in over] == [str(value) for value in other[1]], "a spike's norm has the same bits"
    assert any(verdicts[:400]) == (limit in (0.7, 640.0, 3e18))


def test_far_from_the_limit_nothing_is_sent(bare_world):
    values = [[0.0, 0.5, 0.999], [0.0, 0.5, 0.999]]
    for found in bare_world.run("tests.core.test_ranks.decisions", values=values, limit=1.0):
        assert found == ([False] * 3, [], 0)
