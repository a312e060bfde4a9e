# SPDX-License-Identifier: Apache-2.0
"""Let torchtitan take the CPU for its device; first on the path of its processes."""

from types import SimpleNamespace

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
