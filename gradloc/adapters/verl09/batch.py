# SPDX-License-Identifier: Apache-2.0
"""A batch in verl's TransferQueue as the driver sees it: padded, and fetched when it is asked for.

Shapes: R rows, P prompt and T response positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from ...keys import SEQUENCE_KEY
from ...loop.batch import BatchView
from ...reweighting.stages import STAGE_MASK_KEY
from .packed import padded

_BRIEF = ("response_mask", "advantages")
"""What every update needs; the rest is for an event."""
_PER_TOKEN = (*_BRIEF, "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights", "rm_scores")
_PER_TOKEN += (STAGE_MASK_KEY,)
_OF_CRITIC = ("values", "returns")
_TEACHER = "teacher_logprobs"
_LABELS = ("uid", "data_source", "index")


def fetch(batch: Any, fields: Sequence[str]) -> Any:
    """These fields of a batch, verl's TensorDict, in the order of its rows; a field that nobody put is left out."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def put(batch: Any, fields: dict[str, torch.Tensor]) -> None:
    """Write fields of a batch, of its rows in their order."""
    rows = TensorDict(fields, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows)
    if batch.fields is not None:
        batch.fields = [*dict.fromkeys([*batch.fields, *fields])]


def view_of(batch: Any, is_critics: bool = False, is_distilled: bool = False) -> BatchView:
    """The view of verl's ``KVBatchMeta``; of a critic's update with its values and returns, where distillation is the
    actor's loss with the teacher's log-probs."""
    per_token = (*_PER_TOKEN, *_OF_CRITIC) if is_critics else _PER_TOKEN

    @cache
    def whole() -> tuple[dict[str, torch.Tensor], dict[str, Sequence[Any]]]:
        rows = fetch(batch, ["prompts", "responses", "position_ids", *per_token, *_LABELS, *[_TEACHER] * is_distilled])
        return _tensors(rows, per_token), _labels(batch, rows)

    @cache
    def brief() -> dict[str, torch.Tensor]:
        rows = fetch(batch, _BRIEF)
        return {name: padded(rows[name]) for name in _BRIEF}

    return BatchView(_Lazy(lambda: whole()[0], brief), _Lazy(lambda: whole()[1]), is_critics, is_distilled)


class _Lazy(Mapping[str, Any]):
    """A mapping that is fetched when it is first asked for, and for less where that has the key."""

    def __init__(self, whole: Callable[[], Mapping[str, Any]], brief: Callable[[], Mapping[str, Any]] | None = None):
        self._whole, self._brief = whole, brief

    def __getitem__(self, key: str) -> Any:
        return self._brief()[key] if self._brief is not None and key in _BRIEF else self._whole()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


def _tensors(rows: Any, per_token: Sequence[str]) -> dict[str, torch.Tensor]:
    prompts, responses = rows["prompts"], rows["responses"]
    lengths = prompts.offsets().diff(), responses.offsets().diff()
    prompt_width = int(lengths[0].max())
    left = torch.arange(prompt_width) >= prompt_width - lengths[0].unsqueeze(1)
    right = torch.arange(int(lengths[1].max())) < lengths[1].unsqueeze(1)
    attention_mask = torch.cat([left, right], 1).long()
    input_ids = torch.zeros_like(attention_mask)
    input_ids[:, :prompt_width][left] = prompts.values()
    input_ids[:, prompt_width:][right] = responses.values()
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": _positions(rows["position_ids"], attention_mask, prompt_width - lengths[0]),
        "responses": input_ids[:, prompt_width:],
        **{name: padded(rows[name]) for name in per_token if name in rows.keys()},
    }
    if _TEACHER in rows.keys():
        tensors["teacher_log_probs"] = no_padding_2_padding(rows[_TEACHER], rows).squeeze(-1)
    if "rm_scores" in tensors:
        tensors["token_level_scores"] = tensors.pop("rm_scores")
    return tensors


def _positions(nested: torch.Tensor, attention_mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """(R, P + T), and (R, C, P + T) where pictures have positions of their own."""
    rows = nested.unbind()
    if rows[0].dim() == 1:
        return (attention_mask.cumsum(1) - 1).clamp(min=0)
    positions = rows[0].new_zeros(len(rows), rows[0].shape[0], attention_mask.shape[1])
    for row, start, given in zip(positions, starts.tolist(), rows, strict=True):
        row[:, start : start + given.shape[1]] = given
    return positions


def _labels(batch: Any, rows: Any) -> dict[str, Sequence[Any]]:
    labels = {name: list(rows[name]) for name in _LABELS if name in rows.keys()}
    ids = list(map(_sequence_id, batch.keys, labels["uid"]))
    return {SEQUENCE_KEY: ids, "multi_modal_inputs": _Inputs(batch), **labels}


def _sequence_id(key: str, uid: str) -> str:
    """``<uid>:<rollout>`` from verl's ``<uid>_<rollout>_<part>``; further parts of one rollout keep their number."""
    return f"{uid}:{key.removeprefix(f'{uid}_').removesuffix('_0')}"


class _Inputs(Sequence[Any]):
    """The rows' multi-modal inputs, which are large: each is fetched when it is asked for."""

    def __init__(self, batch: Any):
        self._batch = batch
        self._known: dict[int, Any] = {}

    def __getitem__(self, row: Any) -> Any:
        if row not in self._known:
            key, batch = self._batch.keys[row], self._batch
            rows = tq.kv_batch_get(keys=[key], partition_id=batch.partition_id, select_fields=["multi_modal_inputs"])
            (self._known[row],) = tu.get(rows, "multi_modal_inputs") or [None]
        return self._known[row]

    def __len__(self) -> int:
        return len(self._batch.keys)
