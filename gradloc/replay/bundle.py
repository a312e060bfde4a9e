# SPDX-License-Identifier: Apache-2.0
"""A replay bundle, read from disk and checked. What is wrong with one is said in one sentence.

docs/bundle.md describes it key by key. Only what a replay uses is required, so that a bundle can be written by hand.

Shapes: R rows (sequences), P prompt positions, T response positions.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.trigger import Spike, spike_kind
from ..record import SCHEMA_VERSION, BundleMeta, Event, Trigger
from ..record.reading import read

_LONG = ("input_ids", "attention_mask", "position_ids")  # (R, P + T)
_SHORT = ("responses", "response_mask", "old_log_probs", "advantages")  # (R, T)
_OPTIONAL = ("ref_log_prob", "rollout_log_probs", "rollout_is_weights", "teacher_log_probs")  # (R, T)
_INTEGERS = (*_LONG, "responses")
_LOG_PROBS = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "teacher_log_probs")


class ReplayError(Exception):
    """The event cannot be replayed from what was given; the message is one sentence that says why."""


@dataclass(frozen=True)
class Entry:
    """One micro-batch of the event: rows ``first_row`` to ``end_row``, exclusive, of the bundle's tensors."""

    rank: int
    micro_batch: int
    first_row: int
    end_row: int
    rng: torch.Tensor | None
    """The CPU's random state before the micro-batch's forward, if the bundle has it."""


@dataclass(frozen=True)
class Bundle:
    """An event that can be replayed: checked, so that nothing in it contradicts anything else."""

    folder: Path
    meta: BundleMeta
    tensors: dict[str, torch.Tensor]
    layout: list[Entry]
    dp_size: int
    """Data-parallel ranks of the run; the micro-batches' weights in the step depend on it."""
    inputs: list[dict[str, torch.Tensor]] | None
    """Each row's multi-modal inputs, by verl's names; None for a run on text."""
    names_culprits: bool
    """Whether the event has a list of culprits, even an empty one; one written by hand may not."""

    @property
    def event(self) -> Event:
        return self.meta.event

    @property
    def is_whole(self) -> bool:
        """Whether all of the step's micro-batches are here."""
        per_rank = self.event.step.num_micro_batches
        return per_rank is not None and len(self.layout) == per_rank * self.dp_size

    def token_mask(self, entry: Entry) -> torch.Tensor:
        """bool (B, T): the response tokens of one micro-batch."""
        return self.tensors["response_mask"][entry.first_row : entry.end_row].bool()

    def spike(self, grad_norm: float) -> Spike:
        """The event's trigger, with the replay's norm."""
        trigger = self.event.trigger
        rule = "fixed" if trigger.kind == Trigger.kind else trigger.kind  # one written by hand may not say
        kind = spike_kind(grad_norm, trigger.threshold, rule) or rule
        num_tokens = trigger.num_tokens or int(self.tensors["response_mask"].bool().sum())
        return Spike(kind, grad_norm, trigger.threshold, trigger.tau, num_tokens)


def read_bundle(path: str) -> Bundle:
    """Read and check a bundle, the folder with ``meta.json`` and ``batch.safetensors``; a ReplayError if it is bad."""
    folder = Path(path)
    for name in ("meta.json", "batch.safetensors"):
        if not (folder / name).is_file():
            raise ReplayError(f"{path} is not a bundle folder: it has no {name}.")
    meta, names_culprits = _read_meta(folder / "meta.json")
    if meta.multi_modal_note:
        raise ReplayError(f"{path} cannot be replayed: {meta.multi_modal_note}.")
    tensors = _read_tensors(folder / "batch.safetensors")
    pictures = {name: tensors.pop(name) for name in list(tensors) if name.startswith("multi_modal.")}
    _check_tensors(tensors, meta)
    dp_size = meta.event.step.dp_size
    if dp_size is None or dp_size < 1:
        raise ReplayError(f"meta.json: event.step.dp_size must be at least 1, found {dp_size}.")
    layout = _read_layout(meta, tensors, dp_size)
    _check_values(tensors, layout, meta)
    inputs = _read_inputs(pictures, tensors["responses"].shape[0]) if pictures else None
    return Bundle(folder, meta, tensors, layout, dp_size, inputs, names_culprits)


def _read_meta(path: Path) -> tuple[BundleMeta, bool]:
    """What the file says, and whether its event lists culprits."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} is not readable as JSON: {error}.") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ReplayError(f"{path} has schema_version {version!r}; this version of gradloc reads {SCHEMA_VERSION}.")
    try:
        meta = read(BundleMeta, raw)
    except ValueError as error:
        raise ReplayError(f"meta.json: {error}; docs/bundle.md says what a bundle holds.") from error
    if not meta.temperature > 0:
        raise ReplayError(f"meta.json: temperature must be a positive number, found {meta.temperature}.")
    return meta, "culprits" in raw["event"]


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ReplayError(f"{path} is cut off or is no safetensors file: {error}.") from error


def _check_tensors(tensors: dict[str, torch.Tensor], meta: BundleMeta) -> None:
    needed = list(_LONG + _SHORT)
    if meta.actor.get("use_kl_loss"):
        needed.append("ref_log_prob")
    if (meta.actor.get("policy_loss") or {}).get("loss_mode") == "bypass_mode":
        needed.append("rollout_log_probs")
    if meta.actor.get("distillation_loss"):
        needed.append("teacher_log_probs")
    for name in needed:
        if name not in tensors:
            raise ReplayError(f"batch.safetensors has no tensor {name}.")
    responses = tensors["responses"]
    long = tuple(tensors["input_ids"].shape)
    if responses.dim() != 2 or len(long) != 2 or long[0] != responses.shape[0] or long[1] <= responses.shape[1]:
        raise ReplayError(
            "batch.safetensors: input_ids must be (rows, prompt + response) and responses (rows, response), found "
            f"{long} and {tuple(responses.shape)}."
        )
    for name in [name for name in _LONG + _SHORT + _OPTIONAL if name in tensors]:
        expected = long if name in _LONG else tuple(responses.shape)
        shape = tuple(tensors[name].shape)
        if name == "position_ids" and len(shape) == 3:  # with pictures: (rows, channels, prompt + response)
            shape = (shape[0], shape[2])
        if shape != expected:
            raise ReplayError(f"batch.safetensors: {name} must have the shape {expected}, found {shape}.")
        is_integer = name in _INTEGERS
        if name != "response_mask" and tensors[name].is_floating_point() == is_integer:  # verl's masks are of any dtype
            kind = "integers" if is_integer else "floating point numbers"
            raise ReplayError(f"batch.safetensors: {name} must hold {kind}, found {tensors[name].dtype}.")


def _read_inputs(tensors: dict[str, torch.Tensor], num_rows: int) -> list[dict[str, torch.Tensor]]:
    inputs: list[dict[str, torch.Tensor]] = [{} for _ in range(num_rows)]
    for full_name, value in tensors.items():
        row, _, name = full_name.removeprefix("multi_modal.").partition(".")
        if not row.isdecimal() or int(row) >= num_rows or not name:
            raise ReplayError(f"batch.safetensors: {full_name} is not of one of its {num_rows} rows.")
        inputs[int(row)][name] = value
    return inputs


def _read_layout(meta: BundleMeta, tensors: dict[str, torch.Tensor], dp_size: int) -> list[Entry]:
    num_rows = tensors["responses"].shape[0]
    layout: list[Entry] = []
    for number, item in enumerate(meta.layout):
        rank, micro_batch, (first, end) = item.rank, item.micro_batch, item.rows
        if not 0 <= first < end <= num_rows:
            raise ReplayError(
                f"meta.json: layout[{number}] takes rows {first} to {end}, but the tensors have {num_rows} rows."
            )
        if not 0 <= rank < dp_size or micro_batch < 0:
            raise ReplayError(
                f"meta.json: layout[{number}] is micro-batch {micro_batch} of rank {rank}, but the event had ranks 0 "
                f"to {dp_size - 1}."
            )
        for other in layout:
            if (other.rank, other.micro_batch) == (rank, micro_batch):
                raise ReplayError(f"meta.json: layout lists micro-batch {micro_batch} of rank {rank} twice.")
            if first < other.end_row and other.first_row < end:
                raise ReplayError(f"meta.json: layout[{number}] shares rows with an earlier entry.")
        rng = tensors.get(f"rng.{rank}.{micro_batch}")
        if rng is not None and (rng.dtype, rng.shape) != (torch.uint8, torch.get_rng_state().shape):
            raise ReplayError(f"batch.safetensors: rng.{rank}.{micro_batch} is no random state of this torch's CPU.")
        layout.append(Entry(rank, micro_batch, first, end, rng))
    if not layout:
        raise ReplayError("meta.json: layout is empty, so there is no micro-batch to replay.")
    return layout


def _check_values(tensors: dict[str, torch.Tensor], layout: list[Entry], meta: BundleMeta) -> None:
    is_listed = torch.zeros(tensors["responses"].shape[0], 1, dtype=torch.bool)
    for entry in layout:
        is_listed[entry.first_row : entry.end_row] = True
    mask = tensors["response_mask"].bool() & is_listed
    if not mask.any():
        raise ReplayError("batch.safetensors: response_mask is empty, so there is no token to look at.")
    num_response = tensors["responses"].shape[1]
    if not torch.equal(tensors["input_ids"][:, -num_response:][mask], tensors["responses"][mask]):
        raise ReplayError("batch.safetensors: responses are not the last columns of input_ids.")
    # a gradient that was not finite may come from just such a log-prob, and the replay has to find it
    if meta.event.trigger.kind == "non_finite":
        return
    for name in _LOG_PROBS:
        bad = (tensors[name].isnan() & mask).nonzero().tolist() if name in tensors else []
        if bad:
            row, position = bad[0]
            raise ReplayError(
                f"batch.safetensors: {name} is NaN at {len(bad)} response tokens (first: row {row}, position "
                f"{position}), but the event's norm was finite."
            )
