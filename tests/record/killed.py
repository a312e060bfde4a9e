# SPDX-License-Identifier: Apache-2.0
"""Kills a writer of events at each of its writes, while another one goes on.

    python -m tests.record.killed FOLDER ROUNDS

Each round forks two writers of the same step. One of them is killed before a call that may change a file, or half-way
through it: at the first one in the first round, at the second one in the second round, and so on, round and round.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import safetensors.torch  # noqa: F401 (an import in a forked writer would count as calls)
import torch

from gradloc.record import Event, Step, Trigger
from gradloc.record.bundle import BundleMeta, SequenceFile
from gradloc.record.store import EventStore, save_states

TEXT = "w" * 20_000  # more than a buffer holds, so that a line is written in parts
CHANGES = "open write flush close __exit__ fsync flock chmod rename replace unlink rmdir mkdir serialize_file".split()


class State:
    """A part with a state of several buffers' length."""

    def __init__(self, number: int):
        self.number = number

    def state(self) -> dict[str, Any]:
        return {"number": self.number, "text": TEXT}


def write_event(folder: str, number: int, who: str, start: Callable[[], None] = lambda: None) -> str:
    """Write an event with a bundle and a checkpoint's states; return its name. ``start`` is called once it has one."""
    store = EventStore(folder)
    with store.new_event(number, 0, 0) as name:
        start()
        event = Event(event_id=name, step=Step(global_step=number), trigger=Trigger(kind=who), verdict=TEXT)
        records = {"sequences": SequenceFile(event_id=name), "meta": BundleMeta(1.0, (), event)}
        store.write_folder(name, {"input_ids": torch.arange(30_000)}, records, {"picture.png": TEXT.encode()})
        store.append(event)
    save_states({who: State(number)}, folder)
    return name


def kill_at(last: int, report: Callable[[str], None]) -> None:
    """Kill this process at the write number ``last``, from 1, which is first reported.

    A call that may change a file counts as one; one that writes counts as two, since it is also killed half-way.
    """
    count = 0

    def profile(_: object, event: str, called: Any) -> None:
        nonlocal count
        if event != "c_call" or called.__name__ not in CHANGES:
            return
        count += 1
        if count == last:
            report(f"before {called.__name__}")
            os.kill(os.getpid(), signal.SIGKILL)
        if called.__name__ in ("write", "serialize_file"):
            count += 1
            if count == last:
                report(f"in {called.__name__}")
                written = 0 if called.__self__ is None else os.fstat(called.__self__.fileno()).st_size
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # at the limit the kernel ends the process
                resource.setrlimit(resource.RLIMIT_FSIZE, (written + len(TEXT) // 2,) * 2)

    sys.setprofile(profile)


def main() -> None:
    """Run the rounds, and print a line of JSON for each event written and each writer killed."""
    folder, rounds = sys.argv[1], int(sys.argv[2])
    last = 0
    for number in range(1, rounds + 1):
        last += 1
        children = [_fork(_be_killed, folder, number, last), _fork(_write_two, folder, number)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes[0] in (-signal.SIGKILL, -signal.SIGXFSZ, 0) and codes[1] == 0, codes
        last = last if codes[0] else 0  # every write was made


def _be_killed(folder: str, number: int, last: int) -> None:
    def start() -> None:
        kill_at(last, lambda write: _say(step=number, killed=write))

    write_event(folder, number, "victim", start)
    sys.setprofile(None)
    _say(step=number, killed="")


def _write_two(folder: str, number: int) -> None:
    for _ in range(2):
        _say(written=write_event(folder, number, "other"))


def _say(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())  # whole, unlike print's


def _fork(function: Callable[..., None], *given: Any) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*given)
            code = 0
        finally:
            os._exit(code)
    return child


if __name__ == "__main__":
    main()
