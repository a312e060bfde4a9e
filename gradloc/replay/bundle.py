# SPDX-License-Identifier: Apache-2.0
"""Read a replay bundle from disk and check it; one sentence says what is wrong with it.

docs/bundle.md describes each key. Only the keys that a replay reads are required, so one can write a bundle by hand.

Shapes: R rows (sequences), P prompt positions, T response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..record import Event
from ..record.bundle import BUNDLE_VERSION, BundleEntry, BundleMeta
from ..record.files import is_inside, read_json
from ..record.reading import read

_LONG = ("input_ids", "attention_mask", "position_ids")  # (R, P + T)
_SHORT = ("response_mask", "log_prob_coefficients", "entropy_coefficients")  # (R, T); the last may be missing
_DTYPES = ("float32", "bfloat16", "float16")


class ReplayError(Exception):
    """The event cannot be replayed; the message is one sentence that says why."""


def check(is_right: object, sentence: str) -> None:
    """Raise a ReplayError with this sentence, unless the condition is true."""
    if not is_right:
        raise ReplayError(sentence)


@dataclass(frozen=True)
class Bundle:
    """An event that can be replayed; its parts do not contradict each other."""

    meta: BundleMeta
    event: Event
    layout: tuple[BundleEntry, ...]
    tensors: dict[str, torch.Tensor]
    """The bundle's tensors that a replay reads, by name."""
    multi_modal: dict[str, torch.Tensor]
    """``multi_modal.<row>.<name>``: a row's inputs apart from text, by the model's names."""
    dtype: torch.dtype
    """The dtype of the run's forward."""
    is_critics: bool
    """Whether the model is a critic, which has values in place of log-probs."""
    num_tokens: int
    """Response tokens of the whole step; those of the bundle where the step's number is not known."""

    @property
    def max_culprits(self) -> int | None:
        """The limit on culprits in the run's own config; None without one."""
        value: Any = self.meta.actor
        for name in ("gradloc", "search", "max_culprits"):
            value = value.get(name) if isinstance(value, dict) else None
        return value if type(value) is int and value > 0 else None

    def token_mask(self, entry: BundleEntry) -> torch.Tensor:
        """Return which positions of one micro-batch are response tokens, bool (B, T)."""
        return self.tensors["response_mask"][slice(*entry.rows)]

    def micro_batch(self, entry: BundleEntry, device: torch.device) -> dict[str, torch.Tensor]:
        """Return one micro-batch's tensors, cut to the positions that some row of it attends to."""
        rows = {name: tensor[slice(*entry.rows)].to(device) for name, tensor in self.tensors.items()}
        num_prompt = rows["input_ids"].shape[1] - rows["response_mask"].shape[1]
        attended = rows["attention_mask"].any(0).nonzero()
        first, end = min(int(attended[0]), num_prompt - 1), max(int(attended[-1]), num_prompt) + 1
        cut = {name: rows[name][..., first:end] for name in _LONG}
        return cut | {name: rows[name][:, : end - num_prompt] for name in _SHORT if name in rows}

    def multi_modal_inputs(self, entry: BundleEntry, device: torch.device) -> dict[str, torch.Tensor]:
        """Return one micro-batch's inputs apart from text, row after row as a processor joins them."""
        found: dict[str, list[torch.Tensor]] = {}
        for row in range(*entry.rows):
            for name, tensor in self.multi_modal.items():
                if name.startswith(f"multi_modal.{row}."):
                    found.setdefault(name.split(".", 2)[2], []).append(tensor)
        return {name: torch.cat(tensors).to(device) for name, tensors in found.items()}


def read_bundle(path: str) -> Bundle:
    """Read and check a bundle: the folder with ``meta.json`` and ``batch.safetensors``.

    Raises:
        ReplayError: it lacks something, or its parts contradict each other.
    """
    folder = Path(path)
    check(folder.is_dir(), f"{path} is no folder: name an event's folder, gradloc/events/EVENT of a run.")
    if not (folder / "meta.json").is_file():
        metas = (found for depth in ("*", "*/*", "*/*/*") for found in sorted(folder.glob(f"{depth}/meta.json")))
        event = next((found.parent for found in metas), None)
        check(event is None, f"{path} is no folder of an event, but holds some: name one, such as {event}.")
    for name in ("meta.json", "batch.safetensors"):
        check((folder / name).is_file(), f"{path} is no folder of an event with a bundle: it has no {name}.")
        check(is_inside(folder / name, folder), f"{path}/{name} is a link out of the folder, and is not followed.")
    meta = _read_meta(folder / "meta.json")
    check(not meta.multi_modal_note, f"{path} cannot be replayed: {meta.multi_modal_note}.")
    try:
        stored = load_file(folder / "batch.safetensors")
    except (SafetensorError, OSError, ValueError) as error:
        raise ReplayError(f"{path}/batch.safetensors is cut off or is no safetensors file: {error}.") from error
    for name in (*_LONG, *_SHORT[:-1]):
        check(name in stored, f"batch.safetensors has no tensor {name}.")
    tensors = {name: stored[name].long() for name in _LONG} | {name: stored[name] for name in _SHORT if name in stored}
    _check_shapes(tensors)
    _check_layout(meta.layout, tensors)
    num_response = tensors["response_mask"].shape[1]
    mask = tensors["response_mask"].bool() & tensors["attention_mask"][:, -num_response:].bool()
    has_tokens = any(mask[slice(*entry.rows)].any() for entry in meta.layout)
    check(has_tokens, "batch.safetensors: response_mask is empty in all of layout, so there is no token to look at.")
    num_tokens = meta.event.trigger.num_tokens or int(mask.sum())
    check(num_tokens > 0, f"meta.json: event.trigger.num_tokens must be at least 1, found {num_tokens}.")
    return Bundle(
        meta=meta,
        event=meta.event,
        layout=meta.layout,
        tensors={**tensors, "response_mask": mask},
        multi_modal={name: tensor for name, tensor in stored.items() if name.startswith("multi_modal.")},
        dtype=getattr(torch, meta.dtype or _DTYPES[0]),
        is_critics=meta.event.model == "critic",
        num_tokens=num_tokens,
    )


def _read_meta(path: Path) -> BundleMeta:
    try:
        raw = read_json(path)
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} is not readable as JSON: {error}.") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    older = ", which lacks the coefficients that a backward begins with: replay it by gradloc 0.3.0, where the run's "
    why = f"{older}trainer is installed" if version == 1 else f"; this version of gradloc reads {BUNDLE_VERSION}"
    check(version == BUNDLE_VERSION, f"{path} has schema_version {version!r}{why}.")
    try:
        meta = read(BundleMeta, raw)
    except ValueError as error:
        raise ReplayError(f"meta.json: {error}; docs/bundle.md says what a bundle holds.") from error
    for name, value in (("temperature", meta.temperature), ("loss_scale", meta.loss_scale or 1.0)):
        check(0 < value < math.inf, f"meta.json: {name} must be a positive number, found {value}.")
    check((meta.dtype or _DTYPES[0]) in _DTYPES, f"meta.json: dtype must be one of {_DTYPES}, found {meta.dtype!r}.")
    return meta


def _check_shapes(tensors: dict[str, torch.Tensor]) -> None:
    long, short = tuple(tensors["input_ids"].shape), tuple(tensors["response_mask"].shape)
    shapes = "input_ids must be (rows, prompt + response) and response_mask (rows, response), found"
    is_batch = len(long) == len(short) == 2 and long[0] == short[0] and long[1] > short[1]
    check(is_batch, f"batch.safetensors: {shapes} {long} and {short}.")
    for name, tensor in tensors.items():
        expected, shape = long if name in _LONG else short, tuple(tensor.shape)
        if name == "position_ids" and len(shape) == 3:  # with pictures: (rows, channels, prompt + response)
            shape = (shape[0], shape[2])
        check(shape == expected, f"batch.safetensors: {name} must have the shape {expected}, found {shape}.")


def _check_layout(layout: Sequence[BundleEntry], tensors: dict[str, torch.Tensor]) -> None:
    num_rows = len(tensors["response_mask"])
    for number, entry in enumerate(layout):
        first, end = entry.rows
        takes = f"meta.json: layout[{number}] takes rows {first} to {end}, but the tensors have {num_rows} rows."
        check(0 <= first < end <= num_rows, takes)
        is_any = tensors["attention_mask"][first:end].any()
        check(is_any, f"batch.safetensors: the attention_mask of layout[{number}] is 0 in all of its rows.")
