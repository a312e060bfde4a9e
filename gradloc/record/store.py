# SPDX-License-Identifier: Apache-2.0
"""Events on disk: one line each in ``events.jsonl``, and a folder each with what replays it; states beside checkpoints.

One process writes. A crash while writing leaves the earlier events readable: a bundle is renamed into place when it
is whole, and a line that was cut off is closed before the next one is added.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import SCHEMA_VERSION, Event

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Make a value JSON-ready: NaN and infinities become the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "item"):  # numpy and torch scalars
        return plain(value.item())
    return str(value)


def _dumps(value: Any, **kwargs: Any) -> str:
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, **kwargs)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a path's bytes that UTF-8 does not know, as JSON


class EventStore:
    """The folder ``bisect_dump_dir``, an absolute path; created when the first event is written."""

    def __init__(self, root: str):
        self.root = Path(root)

    def new_id(self, global_step: int, epoch: int, mini_batch: int, model: str = "actor") -> str:
        """A name for an event; a run that was resumed may pass the same step again, so names are made unique."""
        base = f"step{global_step:06d}-epoch{epoch}-mini{mini_batch}" + (f"-{model}" if model != "actor" else "")
        number, name = 1, base
        while (self.root / "events" / name).exists():
            number += 1
            name = f"{base}-{number}"
        return name

    def size_gb(self) -> float:
        """How much the folder holds, checkpoints included."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()) / 1e9

    def write_folder(
        self,
        event_id: str,
        tensors: dict[str, "torch.Tensor"],
        documents: dict[str, Any],
        files: dict[str, bytes] | None = None,
    ) -> str:
        """Write an event's folder: ``batch.safetensors`` if there are tensors, a JSON file per document, other files.

        Returns:
            The folder, relative to the store.
        """
        folder = self.root / "events" / event_id
        partial = folder.with_name(f".{event_id}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if tensors:
            from safetensors.torch import save_file

            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "batch.safetensors")
        for name, document in documents.items():
            (partial / f"{name}.json").write_text(_dumps(document) + "\n", encoding="utf-8")
            if tensors:  # which safetensors lets only their owner read
                shutil.copymode(partial / f"{name}.json", partial / "batch.safetensors")
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        partial.rename(folder)
        return f"events/{event_id}"

    def append(self, event: Event) -> None:
        """Add one event to ``events.jsonl`` and flush it to the disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "events.jsonl"
        line = _dumps(event, sort_keys=True) + "\n"
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())


# ---- what the driver's parts have learned, in one file beside each checkpoint

_STATES = "gradloc.json"


def save_states(parts: Mapping[str, Any], folder: str) -> bool:
    """Write the parts' states, by name, into ``global_step_N``; returns whether there is any and it was written.

    Each part's ``state()`` is JSON-ready, and its ``load_state(state)`` takes it over.
    """
    state = {name: part.state() for name, part in parts.items()}
    if not state:
        return False
    path = os.path.join(folder, _STATES)
    try:
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            json.dump({"schema_version": SCHEMA_VERSION, **state}, file)
        os.replace(f"{path}.partial", path)
    except OSError:
        logger.exception("gradloc: %s could not be written; a resumed run will learn its history again", path)
        return False
    return True


def load_states(parts: Mapping[str, Any], folder: str) -> None:
    """Give the parts what :func:`save_states` wrote; a part whose state is missing or not ours starts anew."""
    path = os.path.join(folder, _STATES)
    if not parts or not os.path.exists(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            states = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        logger.exception("gradloc: %s could not be read; what it remembered is learned again", path)
        return
    for name, part in parts.items():
        if name not in states:
            continue
        try:
            part.load_state(states[name])
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.exception("gradloc: the state of %s in %s cannot be used; it starts anew", name, path)
