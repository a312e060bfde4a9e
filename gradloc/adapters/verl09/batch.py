# SPDX-License-Identifier: Apache-2.0
"""A batch in verl's TransferQueue as the driver sees it: padded, and fetched when it is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu

from ...keys import SEQUENCE_KEY
from ...loop.batch import BatchView
from ...reweighting.stages import STAGE_MASK_KEY

_OF_RESPONSE = ("response_mask", "advantages", "old_log_probs")
_OPTIONAL = ("ref_log_prob", "rollout_log_probs", "rollout_is_weights", "rm_scores", STAGE_MASK_KEY)
_OF_CRITIC = ("values", "returns")
_LABELS = ("uid", "data_source", "index")


def fetch(batch: Any, fields: list[str]) -> Any:
    """These fields of a batch, verl's TensorDict, in the order of its rows; a field that nobody put is left out."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def put(batch: Any, fields: dict[str, torch.Tensor]) -> None:
    """Write fields of a batch, of its rows in their order."""
    rows = TensorDict(fields, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows)
    if batch.fields is not None:
        batch.fields = [*dict.fromkeys([*batch.fields, *fields])]


def view_of(batch: Any, is_critics: bool = False) -> BatchView:
    """The view of verl's ``KVBatchMeta``; of a critic's update with its values and returns."""
    tensors = _Tensors(batch, _OF_CRITIC if is_critics else ())
    return BatchView(tensors, _Labels(batch, tensors), is_critics)


class _Tensors(Mapping[str, torch.Tensor]):
    """What every update needs is fetched first; the rest, for an event, all at once."""

    def __init__(self, batch: Any, more: tuple[str, ...]):
        self._batch, self._optional = batch, (*_OPTIONAL, *more)
        self._found: dict[str, torch.Tensor] = {}
        self._has_all = False
        self.labels: dict[str, list[Any]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._found and key in ("response_mask", "advantages") and not self._has_all:
            found = fetch(self._batch, ["response_mask", "advantages"])
            self._found |= {name: _padded(found[name]) for name in ("response_mask", "advantages")}
        if key not in self._found:
            self._fetch_all()
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        self._fetch_all()
        return iter(self._found)

    def __len__(self) -> int:
        self._fetch_all()
        return len(self._found)

    def _fetch_all(self) -> None:
        if self._has_all:
            return
        self._has_all = True
        found = fetch(self._batch, ["prompts", "responses", "position_ids", *_OF_RESPONSE, *self._optional, *_LABELS])
        prompts, responses = found["prompts"], found["responses"]
        lengths = prompts.offsets().diff(), responses.offsets().diff()
        prompt_width = int(lengths[0].max())
        left = torch.arange(prompt_width) >= prompt_width - lengths[0].unsqueeze(1)
        right = torch.arange(int(lengths[1].max())) < lengths[1].unsqueeze(1)
        attention_mask = torch.cat([left, right], 1).long()
        input_ids = torch.zeros_like(attention_mask)
        input_ids[:, :prompt_width][left] = prompts.values()
        input_ids[:, prompt_width:][right] = responses.values()
        self._found |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": _positions(found["position_ids"], attention_mask, prompt_width - lengths[0]),
            "responses": input_ids[:, prompt_width:],
        }
        present = [name for name in (*_OF_RESPONSE, *self._optional) if name in found.keys()]
        self._found |= {name: _padded(found[name]) for name in present}
        if "rm_scores" in self._found:
            self._found["token_level_scores"] = self._found.pop("rm_scores")
        self.labels = {name: list(found[name]) for name in _LABELS if name in found.keys()}


class _Labels(Mapping[str, Any]):
    def __init__(self, batch: Any, tensors: _Tensors):
        self._batch, self._tensors = batch, tensors
        self._inputs = _Inputs(batch)

    def _all(self) -> dict[str, list[Any]]:
        len(self._tensors)  # fetches both
        labels = self._tensors.labels
        names = list(map(_sequence_id, self._batch.keys, labels["uid"]))
        return {SEQUENCE_KEY: names, "multi_modal_inputs": self._inputs, **labels}

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _sequence_id(key: str, uid: str) -> str:
    """``<uid>:<rollout>`` from verl's ``<uid>_<rollout>_<part>``; further parts of one rollout keep their number."""
    return f"{uid}:{key.removeprefix(f'{uid}_').removesuffix('_0')}"


def _positions(nested: torch.Tensor, attention_mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """(R, P + T), and (R, C, P + T) where pictures have positions of their own."""
    rows = nested.unbind()
    if rows[0].dim() == 1:
        return (attention_mask.cumsum(1) - 1).clamp(min=0)
    padded = rows[0].new_zeros(len(rows), rows[0].shape[0], attention_mask.shape[1])
    for row, start, positions in zip(padded, starts.tolist(), rows, strict=True):
        row[:, start : start + positions.shape[1]] = positions
    return padded


class _Inputs(Sequence[Any]):
    """The rows' multi-modal inputs, which are large: each is fetched when it is asked for."""

    def __init__(self, batch: Any):
        self._batch = batch
        self._found: dict[int, Any] = {}

    def __getitem__(self, row: Any) -> Any:
        if row not in self._found:
            key, batch = self._batch.keys[row], self._batch
            found = tq.kv_batch_get(keys=[key], partition_id=batch.partition_id, select_fields=["multi_modal_inputs"])
            (self._found[row],) = tu.get(found, "multi_modal_inputs") or [None]
        return self._found[row]

    def __len__(self) -> int:
        return len(self._batch.keys)


def _padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0) if values.is_nested else values
