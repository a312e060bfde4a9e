# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""From raw numbers to an event that can be read: text, log-probs, ratios, cause. Runs on the driver.

The driver holds the whole batch, the tokenizer and the rewards, so the actor sends only what it alone knows.

Shapes: R rows of the batch, P prompt positions, T response positions.
"""

import math
from typing import Any

import torch

from .causes import BatchStatistics, classify

__all__ = ["SCHEMA_VERSION", "bundle_tensors", "complete_event", "complete_sequences"]

SCHEMA_VERSION = 1

BUNDLE_KEYS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "responses",
    "response_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "lopti_mask",
)


def complete_event(raw: dict[str, Any], event_id: str, run: dict[str, Any], batch: Any, tokenizer: Any, context: int):
    """Turn the actor's raw event into the record that goes to disk.

    Args:
        raw: what :meth:`hook.ActorHook` returned.
        event_id: name of the event.
        run: identity of the run.
        batch: verl's DataProto of the step, in the order in which it was dispatched.
        tokenizer: decodes the text; None keeps text and prompts out.
        context: tokens of text to keep on either side of a culprit.

    Returns:
        The event record, schema version 1.
    """
    tensors = batch.batch
    statistics = _statistics(tensors, raw)
    texts = _Texts(tokenizer, tensors, context)
    culprits = [_complete_culprit(dict(culprit), batch, texts, statistics) for culprit in raw["culprits"]]
    return {
        "schema_version": SCHEMA_VERSION,
        "event_id": event_id,
        "run": run,
        "step": raw["step"],
        "trigger": raw["trigger"],
        "search": raw["search"],
        "culprits": culprits,
        "certificate": raw["certificate"],
        "action": raw["action"],
        "layers": raw["layers"],
        "kinds": raw["kinds"],
        "layer_history": raw["layer_history"],
        "shares": raw["shares"],
        "batch": vars(statistics),
        "folder": None,
    }


def complete_sequences(raw: dict[str, Any], event_id: str, batch: Any, tokenizer: Any) -> dict[str, Any]:
    """The sequences that hold culprits, token by token: what the report shades.

    Returns:
        ``sequences.json``: per sequence its prompt, its response tokens as text, and per-token numbers of the same
        length (null where a number is not known).
    """
    texts = _Texts(tokenizer, batch.batch, 0)
    sequences = []
    for sequence in raw["sequences"]:
        row = sequence["row"]
        num_tokens = int(batch.batch["attention_mask"][row][-batch.batch["responses"].shape[1] :].sum())
        stored = {
            "old_log_prob": "old_log_probs",
            "rollout_log_prob": "rollout_log_probs",
            "ref_log_prob": "ref_log_prob",
            "advantage": "advantages",
            "is_weight": "rollout_is_weights",
            "response_mask": "response_mask",
        }
        numbers = {key: value for key, value in sequence.items() if isinstance(value, list)}
        for name, key in stored.items():
            numbers[name] = batch.batch[key][row].tolist() if key in batch.batch.keys() else None
        ids = batch.batch["responses"][row][:num_tokens].tolist()
        labels = batch.non_tensor_batch
        sequences.append(
            {
                **{key: sequence[key] for key in ("rank", "micro_batch", "micro_batch_row", "row")},
                "sequence_id": str(labels["sequence_id"][row]) if "sequence_id" in labels else None,
                "data_source": str(labels["data_source"][row]) if "data_source" in labels else None,
                "prompt": texts.prompt(row),
                "token_ids": ids if tokenizer is not None else None,
                "tokens": [texts.decode([token]) for token in ids] if tokenizer is not None else None,
                "entropy": None,
                "share": None,
                **{name: None if values is None else values[:num_tokens] for name, values in numbers.items()},
            }
        )
    return {"schema_version": SCHEMA_VERSION, "event_id": event_id, "sequences": sequences}


def bundle_tensors(raw: dict[str, Any], batch: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Cut the micro-batches that the actor listed out of the driver's batch.

    Returns:
        Tensors with the listed rows one after the other, plus one ``rng.<rank>.<micro_batch>`` each; and the layout:
        per entry rank, micro_batch, and the interval ``rows`` it takes in the tensors.
    """
    rows = [row for entry in raw["layout"] for row in entry["rows"]]
    tensors = {key: batch.batch[key][rows].clone() for key in BUNDLE_KEYS if key in batch.batch.keys()}
    layout, start = [], 0
    for entry in raw["layout"]:
        end = start + len(entry["rows"])
        layout.append({"rank": entry["rank"], "micro_batch": entry["micro_batch"], "rows": [start, end]})
        tensors[f"rng.{entry['rank']}.{entry['micro_batch']}"] = torch.from_numpy(entry["rng"].copy())
        start = end
    return tensors, layout


def _statistics(tensors: Any, raw: dict[str, Any]) -> BatchStatistics:
    mask = tensors["response_mask"].bool()
    advantages = tensors["advantages"][mask].abs()
    advantages = advantages[torch.isfinite(advantages) & (advantages > 0)]
    probs = tensors["old_log_probs"][mask].float().exp()
    norm_after, coefficient_norm = raw["certificate"]["norm_after"], raw["residual_coefficient_norm"]
    has_jacobian = math.isfinite(norm_after) and math.isfinite(coefficient_norm) and coefficient_norm > 0
    return BatchStatistics(
        advantage=float(advantages.median()) if len(advantages) else 0.0,
        one_minus_prob=float(1 - probs.nanmean()) if len(probs) else 0.0,
        jacobian=norm_after / coefficient_norm if has_jacobian else None,
        layer_spread=raw["layer_history"]["spread"] if raw["layer_history"] else None,
    )


class _Texts:
    """Decodes pieces of rows; bad token ids become a visible stand-in instead of an error."""

    def __init__(self, tokenizer: Any, tensors: Any, context: int):
        self._tokenizer = tokenizer
        self._tensors = tensors
        self._context = context

    def decode(self, ids: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:
            return " ".join(f"<{token}>" for token in ids)

    def prompt(self, row: int) -> str:
        return self.decode(self._prompt_ids(row))

    def _prompt_ids(self, row: int) -> list[int]:
        num_response = self._tensors["responses"].shape[1]
        attended = self._tensors["attention_mask"][row].bool()[:-num_response]
        return self._tensors["input_ids"][row][:-num_response][attended].tolist()

    def around(self, row: int, first: int, last: int) -> dict[str, Any]:
        """Text of a span of response positions ``first..last`` and what stands around it."""
        responses = self._tensors["responses"][row]
        num_response = responses.shape[0]
        attended = self._tensors["attention_mask"][row].bool()
        prompt = self._prompt_ids(row)
        answer = responses[attended[-num_response:]].tolist()
        span = responses[first : last + 1].tolist()
        before = (prompt + responses[:first].tolist())[-self._context :] if self._context else []
        after = answer[last + 1 : last + 1 + self._context]
        return {
            "token_ids": span,
            "tokens": None if self._tokenizer is None else [self.decode([token]) for token in span],
            "text_before": self.decode(before),
            "text_after": self.decode(after),
            "prompt": self.decode(prompt),
        }


def _complete_culprit(culprit: dict[str, Any], batch: Any, texts: _Texts, statistics: BatchStatistics):
    tensors, labels = batch.batch, batch.non_tensor_batch
    row, positions = culprit["row"], culprit["positions"]
    peak = culprit["peak"]

    def at(key: str) -> float | None:
        return float(tensors[key][row, peak]) if key in tensors.keys() else None

    def label(key: str) -> str | None:
        return str(labels[key][row]) if key in labels else None

    culprit.update(
        sequence_id=label("sequence_id"),
        data_source=label("data_source"),
        reward=float(tensors["token_level_scores"][row].sum()) if "token_level_scores" in tensors.keys() else None,
        advantage=at("advantages"),
        old_log_prob_stored=at("old_log_probs"),
        rollout_log_prob=at("rollout_log_probs"),
        ref_log_prob=at("ref_log_prob"),
        is_weight=at("rollout_is_weights"),
        **texts.around(row, positions[0], positions[-1]),
    )
    culprit["ratios"] = {
        "current_over_old": _ratio(culprit["log_prob"], culprit["old_log_prob_used"]),
        "current_over_rollout": _ratio(culprit["log_prob"], culprit["rollout_log_prob"]),
        "old_over_rollout": _ratio(culprit["old_log_prob_stored"], culprit["rollout_log_prob"]),
        "sequence_geometric_mean": _ratio(culprit.pop("sequence_mean_log_ratio"), 0.0),
    }
    culprit["cause"] = classify(culprit, statistics)
    return culprit


def _ratio(log_new: float | None, log_old: float | None) -> float | None:
    if log_new is None or log_old is None:
        return None
    difference = log_new - log_old
    return math.exp(difference) if difference < 700 else math.inf
