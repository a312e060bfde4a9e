# SPDX-License-Identifier: Apache-2.0
"""Measure a device's peak of memory (on a CPU: the process's), and wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_KIB_PER_MIB = 1024


class Peak:
    """The result, set when the measurement ends."""

    extra_mib: float | None = None
    """Peak above the use at the start in MiB; None if unknown."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the block's peak above its start."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield peak
        peak.extra_mib = (torch.cuda.max_memory_allocated(device) - start) / 2**20
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the high-water mark
    start = _status("VmRSS")
    yield peak
    end = _status("VmHWM")
    peak.extra_mib = None if start is None or end is None else (end - start) / _KIB_PER_MIB


def _status(key: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return None


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
