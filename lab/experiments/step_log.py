# SPDX-License-Identifier: Apache-2.0
"""Log the steps of trainers other than verl as verl does. Needs no package."""

import json
from collections.abc import Mapping
from pathlib import Path


def begin(num_steps: int) -> None:
    """Print how many steps there will be."""
    print(f"Total training steps: {num_steps}", flush=True)


def log_step(step: int, data: Mapping[str, float], run_dir: Path) -> None:
    """Print a line in the format of verl's console logger, and append one to `metrics.jsonl`."""
    print(f"step:{step} - " + " - ".join(f"{name}:{value:.6g}" for name, value in data.items()), flush=True)
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "data": dict(data)}) + "\n")
