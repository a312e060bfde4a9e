# SPDX-License-Identifier: Apache-2.0
"""What a device is asked for measurements: its peak of memory (a CPU's: of the process), and to be done."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_KIB_PER_MIB = 1024


class Peak:
    """Filled when the measurement ends."""

    extra_mib: float | None = None
    """Peak above what was in use at the start; None where the system does not tell."""


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
        Path("/proc/self/clear_refs").write_text("5")  # Linux: start the high-water mark anew
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
    """Until it has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
