# SPDX-License-Identifier: Apache-2.0
"""The ranks acting as one: reductions, gathers, and agreement before the next collective.

A rank that fails alone leaves its peers waiting for it in a collective, until a time-out ends the run. So whatever may
fail locally runs through :meth:`Ranks.run_local_synced`: all ranks learn whether all succeeded before any enters the
next collective. What has collectives of its own, such as an FSDP forward or backward, runs through
:meth:`Ranks.run_collective`.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE_S = 40.0  # how long a rank waits for peers that may have failed, at most one pass behind: all end in a minute
_LOOK_EVERY_S = 1.0  # how often a waiting rank looks whether a peer has failed, or is done
_ASK_EVERY_S = 0.1  # how often a rank that can do nothing else asks the process group's store
_groups = itertools.count(1)  # numbers the steps of host_group(), alike on all ranks
_calls = itertools.count(1)  # numbers the calls of run_collective(), alike on all ranks, for keys in the store
_decisions = itertools.count(1)  # numbers the calls of decided(), alike on all ranks
_ORDERS = 16.0  # times processes times rounding: sums in other orders, and limits made of them, are closer than that
_ROUNDING = 2.0**-23  # of float32
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR
_HUGE = 1e18  # float32 has no room for the square of a norm ten times that: in some order it is inf


class PeerFailure(RuntimeError):
    """Some rank failed, and every rank knows: all can go on."""


class LostRank(RuntimeError):
    """A rank failed where its peers wait for it in a collective: the process group cannot go on."""


def host_group() -> Any | None:
    """Return a group of all processes whose collectives run on the host; None where the default group serves.

    A trainer whose only group is the device's would have small messages wait for the device, and take memory there. But
    gloo connects every process with every other over an interface that NCCL never needed, and waits forever for one
    that cannot be reached. So sockets of ours try it first: where some do not connect in 40 seconds, all go on with the
    device's group. All processes call this together.
    """
    if not dist.is_initialized() or distributed_c10d._get_object_coll_device(None) == "cpu":
        return None
    servers, error = _attempt(_listen)
    if _is_everywhere(error is None):
        _, error = _attempt(partial(_connect_all, cast(list[socket.socket], servers)))
        if _is_everywhere(error is None):
            return dist.new_group(backend="gloo")
    if error is not None:
        logger.warning(
            "gradloc: gloo cannot connect the processes (%s), so small messages go by the device's group, which every "
            "look into a step waits for; set GLOO_SOCKET_IFNAME to the interface that the nodes share",
            str(error).splitlines()[0],
        )
    return None


def _listen() -> list[socket.socket]:
    """Return sockets that listen at the addresses that gloo takes: of each interface named, else of the host's name."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [socket.create_server((_address_of(name), 0), backlog=dist.get_world_size()) for name in names]
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError):
                return [socket.create_server(address[:2], family=family, backlog=dist.get_world_size())]
    return [socket.create_server(("127.0.0.1", 0), backlog=dist.get_world_size())]


def _address_of(interface: str) -> str:
    import fcntl  # Windows has none

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise OSError(f"interface {interface}: {error.strerror}") from error
    return socket.inet_ntoa(found[20:24])


def _connect_all(servers: list[socket.socket]) -> None:
    """Connect every process with every other, as gloo will, with as many sockets at once.

    Raises:
        OSError: where a peer does not answer in time, or this process may not open as many.
    """
    store, key, deadline = _store(), f"gradloc/group/{next(_groups)}", time.monotonic() + _PATIENCE_S
    process, num_processes = dist.get_rank(), dist.get_world_size()

    def remaining() -> float:
        return max(deadline - time.monotonic(), 0.01)

    with contextlib.ExitStack() as held:
        for server in servers:
            held.enter_context(server)
        store.set(f"{key}/{process}", json.dumps([server.getsockname()[:2] for server in servers]))
        for peer in range(process):
            store.wait([f"{key}/{peer}"], timedelta(seconds=remaining()))
            for address in json.loads(store.get(f"{key}/{peer}")):
                connection = held.enter_context(socket.create_connection(tuple(address), timeout=remaining()))
                connection.sendall(f"{key}/{process}".encode())
        for server in servers:
            awaited = {f"{key}/{peer}".encode() for peer in range(process + 1, num_processes)}
            while awaited:
                server.settimeout(remaining())
                connection = held.enter_context(server.accept()[0])
                connection.settimeout(remaining())
                awaited.discard(connection.recv(64))


def _is_everywhere(flag: bool) -> bool:
    """Return whether the flag is set on all processes, by the default group's store: no collective is needed.

    All return the same: what the first to know has found.
    """
    store, key, num_processes = _store(), f"gradloc/group/{next(_groups)}", dist.get_world_size()
    store.add(f"{key}/set", int(flag))
    num_answers, deadline = store.add(key, 1), time.monotonic() + 2 * _PATIENCE_S
    while num_answers < num_processes and time.monotonic() < deadline:
        time.sleep(_ASK_EVERY_S)
        num_answers = store.add(key, 0)
    found = b"all" if store.add(f"{key}/set", 0) == num_processes else b"not all"
    return store.compare_set(f"{key}/found", "", found.decode()) == b"all"


class Ranks:
    """The data-parallel ranks of a process group, or one process if torch.distributed is not initialised.

    With sequence or model parallelism, ``replicas`` processes hold the same sequences and count as one rank.

    The numbers that ranks exchange lie on the host. They travel by the group's host backend (gloo) if it has one, as
    verl's groups do, so that nothing waits for the device.

    Args:
        group: the process group of all trainer processes; None for the default one.
        device: the model's, whose collectives show how far a rank has come.
        replicas: processes per data-parallel rank; divides the group's size.
        rank_of: the data-parallel rank of each process; None if those of one rank are consecutive.
        is_in_step: whether all processes issue the same collectives in a forward or backward. Stages of a pipeline do
            not; then only this group's collectives are counted, which are issued between passes.
    """

    def __init__(
        self,
        group: Any | None = None,
        device: str | torch.device = "cpu",
        replicas: int = 1,
        rank_of: Sequence[int] | None = None,
        is_in_step: bool = True,
    ):
        self.group = group
        self.device = torch.device(device)
        self.replicas = replicas
        alone = not dist.is_initialized()
        self._is_by_host = alone or distributed_c10d._get_object_coll_device(group) == "cpu"
        process = 0 if alone else dist.get_rank(group)
        self.num_processes = 1 if alone else dist.get_world_size(group)
        ranks = [number // replicas for number in range(self.num_processes)] if rank_of is None else list(rank_of)
        self.process, self.rank = process, ranks[process]
        self.size = self.num_processes // replicas
        self._firsts = [ranks.index(rank) for rank in range(self.size)]
        self._counted = None if is_in_step else group or dist.group.WORLD
        self.is_first = process == 0
        self._call = 0
        self._start: int | None = None

    def connect(self) -> None:
        """Run a first collective, so that the communicator takes its memory now and not at a spike."""
        self.sum([0.0])

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over the ranks, in float64; the same bits on every rank."""
        return [value / self.replicas for value in self._reduced(values, dist.ReduceOp.SUM)]

    def max(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the ranks; a NaN comes back as inf. The same bits on every rank."""
        # gloo and NCCL disagree about the largest of a NaN and a number, so a NaN travels as inf
        return self._reduced([math.inf if math.isnan(value) else value for value in values], dist.ReduceOp.MAX)

    def _reduced(self, values: list[float], op: Any) -> list[float]:
        if self.num_processes == 1:
            return [float(value) for value in values]
        sent = self._sent(values)
        dist.all_reduce(sent, op=op, group=self.group)
        return sent.tolist()

    def all(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank."""
        return self.max([0.0 if flag else 1.0])[0] == 0.0

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's value, in rank order, on every rank."""
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value, group=self.group)
        return [values[first] for first in self._firsts]

    def gather_first(self, value: Any) -> list[Any] | None:
        """Gather every rank's value, in rank order, on the first process; returns None on the others.

        All are padded to the longest when sent. If one rank's value is far larger, use :meth:`broadcast_from`.
        """
        if self.num_processes == 1:
            return [value]
        values: list[Any] | None = [None] * self.num_processes if self.is_first else None
        dist.gather_object(value, values, dst=self._global(0), group=self.group)
        return None if values is None else [values[first] for first in self._firsts]

    def broadcast_from(self, rank: int, value: Any) -> Any:
        """Return one rank's value on every rank; the others' arguments are ignored."""
        if self.num_processes == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._global(self._firsts[rank]), group=self.group)
        return box[0]

    def decided(self, value: float, limit: float | None, rounding: float = _ROUNDING) -> tuple[float, bool]:
        """Return the first process' value and whether it is over its limit, where a value is near its limit or over it;
        else this process' own. No collective.

        A reduction may add in another order on each process, so values differ in their last bits, and a limit between
        them would part the ranks. The first process writes its value into the process group's store where it is near
        the limit or over it, and the others read it there where theirs is. They ask from half as far below the limit as
        it writes, and values are closer than that. So who asks is answered, and who does not is on the first one's
        side: far from the limit nothing is sent.

        Args:
            value: reduced over the ranks, such as a gradient norm; may be NaN or inf. All call this together.
            limit: the same on all, or as close as the values; None where only what is not finite is over it.
            rounding: of the reduction, relative.

        Raises:
            LostRank: where the first process does not answer until the store's own time-out.
        """
        number, is_over = next(_decisions), not math.isfinite(value) or (limit is not None and value > limit)
        if self.num_processes == 1:
            return value, is_over
        margin = min(_ORDERS * self.num_processes * rounding, 0.25)
        bound = _HUGE if limit is None else min(limit, _HUGE)
        if value < bound * (1 - (2 if self.is_first else 1) * margin):
            return value, is_over
        key = f"gradloc/decided/{number}"
        try:
            if self.is_first:
                _store().set(key, f"{value!r} {is_over:d}")
                return value, is_over
            found, verdict = _store().get(key).decode().split()
        except Exception as error:
            raise LostRank("the first rank's norm decides for all, and cannot be had") from error
        return float(found), verdict == "1"

    def _sent(self, values: list[float]) -> torch.Tensor:
        sent = torch.tensor(values, dtype=torch.float64)
        return sent if self._is_by_host else sent.to(self.device)

    def _global(self, process: int) -> int:
        return process if self.group is None else dist.get_global_rank(self.group, process)

    def run_local_synced(self, local: Callable[[], T]) -> T:
        """Run a local computation; return its result if it succeeded on every rank.

        ``local`` must not communicate.

        Raises:
            PeerFailure: on every rank, if any rank's computation raised.
        """
        result, error = _attempt(local)
        if self.sum([0.0 if error is None else 1.0])[0] > 0:
            raise self._failure(error) from error
        return cast(T, result)

    def run_slowly_synced(self, local: Callable[[], T]) -> T:
        """Run as :meth:`run_local_synced` what may outlast a collective's time-out, such as writing to a slow disk.

        It runs in a thread. Meanwhile all ranks meet every few seconds, so that no watchdog takes them for stuck.
        """
        found: list[tuple[T | None, Exception | None]] = []
        worker = threading.Thread(target=lambda: found.append(_attempt(local)), daemon=True)
        worker.start()
        while not self.all(bool(found)):
            worker.join(_LOOK_EVERY_S)

        def settled() -> T:
            result, error = found[0]
            if error is not None:
                raise error
            return cast(T, result)

        return self.run_local_synced(settled)

    def run_collective(self, joint: Callable[[], T]) -> T:
        """Run what has collectives of its own; return its result if it succeeded on every rank.

        All ranks issue the same collectives in the same order, so how many a rank has issued is its *position*. Two
        ranks at the same position have no collective open between them: whatever one issued, the other joined. From
        there both may enter any other collective, whether they got there by success or by failure. (That all failed is
        not enough. On a GPU the host runs ahead, and one rank may have issued a whole forward that another never
        joined.) A failed rank learns its peers' positions from the process group's key-value store, which needs no
        collective and works while one is stuck. There are three cases:

        - All ranks failed at the same position, such as out of memory everywhere. None waits for another.
        - Some failed after the last collective, in the logits or the loss. The others succeeded and wait in the
          agreement that ends every call. The failed ones join it.
        - A peer waits in a collective that this rank will never enter. Nothing can end that.

        Calls may be nested; an error of an inner one has been settled there.

        Raises:
            PeerFailure: on every rank, if any rank's computation raised.
            LostRank: on a failed rank that cannot get back in step, and on those of its peers that hear of it.
        """
        if self.num_processes == 1:
            return joint()
        outer = self._call, self._start
        present = self._call, self._start = next(_calls), _num_collectives(self.device, self._counted)
        try:
            result, error = _attempt(joint)
            self._call, self._start = present
            if isinstance(error, LostRank):
                self._tell_lost()
            if isinstance(error, PeerFailure | LostRank):
                raise error
            if error is not None and self._have_all_failed(error):
                raise self._failure(error) from error
            if self._sum_watched(error is not None) > 0:
                raise self._failure(error) from error
            return cast(T, result)
        finally:
            self._call, self._start = outer

    def _failure(self, error: Exception | None) -> PeerFailure:
        reason = "on another rank" if error is None else f"rank {self.rank}: {type(error).__name__}: {error}"
        return PeerFailure(f"a part of the search failed ({reason})")

    def _have_all_failed(self, error: Exception) -> bool:
        """Return whether all ranks failed at this position. False: peers wait in the agreement that ends the call."""
        why = "a forward or backward of the search failed here, while other ranks wait for this one in a collective"
        position = self._position()
        if position is None:
            raise LostRank(f"{why}, or may: this backend does not count collectives") from error
        try:
            store, here = _store(), self._key(position)
            store.add(self._key("failed"), 1)
            num_failed = store.add(f"{here}/failed", 1)
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline and not store.check([self._key("lost")]):
                if num_failed == self.num_processes:
                    return True
                if store.check([f"{here}/waits"]):
                    return False
                time.sleep(_ASK_EVERY_S)
                num_failed = store.add(f"{here}/failed", 0)
        except Exception:
            logger.exception("gradloc: the store of the process group does not answer")
        self._tell_lost()
        raise LostRank(why) from error

    def _tell_lost(self) -> None:
        """Let peers that wait for this rank in an agreement know that it will not come."""
        with contextlib.suppress(Exception):  # the store may have ended with another rank
            _store().set(self._key("lost"), "")

    def _sum_watched(self, has_failed: bool) -> float:
        """Agree on how many ranks failed. A rank that waits long looks for failed peers, and shows where it waits."""
        position = self._position()
        total = self._sent([float(has_failed)])
        try:
            work = dist.all_reduce(total, group=self.group, async_op=True)
            pause, next_look = 0.0001, time.monotonic() + _LOOK_EVERY_S
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
                if time.monotonic() < next_look:
                    continue
                next_look += _LOOK_EVERY_S
                if _store().check([self._key("lost")]):
                    raise LostRank("another rank failed inside a forward or backward of the search")
                if not has_failed and _store().add(self._key("failed"), 0) > 0:
                    _store().set(f"{self._key(position)}/waits", "")
            work.wait()
        except LostRank:
            raise
        except Exception as error:  # the agreement itself failed: not every rank knows
            raise LostRank("a rank has ended, or the store of the process group does not answer") from error
        return float(total)

    def _position(self) -> int | None:
        """Count the collectives that this rank has issued since the call began; None if the backend does not count."""
        now = _num_collectives(self.device, self._counted)
        return None if now is None or self._start is None else now - self._start

    def _key(self, what: Any) -> str:
        return f"gradloc/{self._call}/{what}"


def _attempt(computation: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return computation(), None
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold a whole forward's activations
        return None, error


def _num_collectives(device: torch.device, only: Any | None) -> int | None:
    """Count the collectives that this process has issued on this kind of device, in all groups or ``only`` one; None if
    the backend does not count."""
    total, groups = 0, list(distributed_c10d._world.pg_map) if only is None else [only]
    for group in groups:
        try:
            backend: Any = group._get_backend(device)
        except RuntimeError:  # a group of another kind of device
            continue
        try:
            total += backend._get_sequence_number_for_group()
        except RuntimeError:
            return None
    return total


def _store() -> Any:
    return distributed_c10d._get_default_store()
