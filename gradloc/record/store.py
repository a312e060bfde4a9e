# SPDX-License-Identifier: Apache-2.0
"""Write events to disk, one line of ``events.jsonl`` and one folder each, and save states with checkpoints.

A process that is killed while it writes leaves the earlier events readable: a folder is renamed into place when it is
whole, and a line that was cut off is closed before the next one is added. Two processes may write into one folder.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import SCHEMA_VERSION, Event
from .files import read_json, write_whole

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinities are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
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
    # a path may hold bytes that are not UTF-8, which Python keeps as lone surrogates
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class EventStore:
    """The folder ``bisect_dump_dir``, an absolute path; created when the first event is written."""

    def __init__(self, root: str):
        self.root = Path(root)
        self.last = ""
        """The event whose line was added last."""

    @contextmanager
    def new_event(self, global_step: int, epoch: int, mini_batch: int, model: str = "actor") -> Iterator[str]:
        """Reserve a name for an event, for :meth:`write_folder`; without that call it is free again at the end.

        No other process gets the name, nor the same run if it is resumed and passes the step again.
        """
        base = f"step{global_step:06d}-epoch{epoch}-mini{mini_batch}" + (f"-{model}" if model != "actor" else "")
        number, name = 1, base
        while not self._take_name(name):
            number += 1
            name = f"{base}-{number}"
        try:
            yield name
        finally:  # a full disk, Ctrl-C; once the folder has its name, a partial one is another process'
            if not self._partial(name).with_name(name).exists():
                shutil.rmtree(self._partial(name), ignore_errors=True)

    def _partial(self, name: str) -> Path:
        return self.root / "events" / f".{name}.partial"

    def _take_name(self, name: str) -> bool:
        """Make the folder for an event of this name; return False where it exists or another process makes it."""
        partial = self._partial(name)
        if partial.with_name(name).exists():
            return False
        try:
            partial.mkdir(parents=True)
        except FileExistsError:
            return False
        if not partial.with_name(name).exists():
            return True
        partial.rmdir()  # another process was just done with it
        return False

    def about(self) -> str:
        """Return a clause on what a new run should know of the folder; empty where there is nothing."""
        existing = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        if not os.access(existing, os.W_OK):
            return f"; {existing} cannot be written to"
        return ", behind those of an earlier run" if (self.root / "events.jsonl").exists() else ""

    def size_gb(self) -> float:
        """Return the size of the folder in gigabytes, checkpoints included."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()) / 1e9

    def write_folder(
        self,
        event_id: str,
        tensors: dict[str, "torch.Tensor"],
        records: dict[str, Any],
        files: dict[str, bytes] | None = None,
    ) -> str:
        """Write an event's folder: ``batch.safetensors`` if there are tensors, JSON files, other files.

        Args:
            event_id: from :meth:`new_event`.
            tensors: by name.
            records: content of the JSON files, by name without ``.json``.
            files: content by name.

        Returns:
            The folder, relative to the store.
        """
        partial = self._partial(event_id)
        if tensors:
            from safetensors.torch import save_file

            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "batch.safetensors")
        for name, record in records.items():
            (partial / f"{name}.json").write_text(_dumps(record) + "\n", encoding="utf-8")
            if tensors:  # safetensors lets only the owner read its file: give it the mode that the umask asks for
                shutil.copymode(partial / f"{name}.json", partial / "batch.safetensors")
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        partial.rename(self.root / "events" / event_id)
        return f"events/{event_id}"

    def append(self, event: Event) -> None:
        """Add one event to ``events.jsonl`` and flush it to the disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "events.jsonl"
        line = (_dumps(event, sort_keys=True) + "\n").encode("utf-8")
        with open(path, "ab+") as file:
            with suppress(ImportError, OSError):  # a file system without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a process was killed while it wrote
                    line = b"\n" + line
            file.write(line)
            self.last = event.event_id
            file.flush()
            os.fsync(file.fileno())


# ---- the driver's learned states, one file per checkpoint

_STATES = "gradloc.json"


def save_states(parts: Mapping[str, Any], folder: str) -> bool:
    """Write the parts' states, by name, into a checkpoint's folder; return whether any was written.

    Each part's ``state()`` is JSON-ready, and its ``load_state(state)`` takes it over. A part that is off is None.
    """
    state = {name: part.state() for name, part in parts.items() if part is not None}
    if not state:
        return False
    path = os.path.join(folder, _STATES)
    try:
        write_whole(Path(path), json.dumps({"schema_version": SCHEMA_VERSION, **state}))
    except OSError:
        logger.exception("gradloc: %s could not be written; a resumed run will learn its history again", path)
        return False
    return True


def load_states(parts: Mapping[str, Any], folder: str) -> None:
    """Load the states that :func:`save_states` wrote; a part whose state is missing or cannot be used starts anew."""
    path = os.path.join(folder, _STATES)
    if all(part is None for part in parts.values()) or not os.path.exists(path):
        return
    try:
        states = dict(read_json(Path(path)))
    except (OSError, ValueError, TypeError) as error:
        logger.error("gradloc: %s could not be read (%s); what it remembered is learned again", path, error)
        return
    for name, part in parts.items():
        if part is None or name not in states:
            continue
        try:
            part.load_state(states[name])
        except Exception:
            logger.exception("gradloc: the state of %s in %s cannot be used; it starts anew", name, path)
