# SPDX-License-Identifier: Apache-2.0
"""The rows of an optimizer step as events see them: those of a rank, and all ranks' put together on the first.

Shapes: R rows, P prompt and T completion positions; each rank pads to its own longest.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch

from ...loop.batch import BatchView
from ...loop.driver import sequence_ids
from .step import TrlStep, mask_of

REWARD_KEY = "gradloc_reward"
"""(B,) among TRL's inputs, which travel with it: each row's reward."""
_NAMES = {
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "responses",
    "completion_mask": "completion_mask",
    "advantages": "advantages",
    "ref_per_token_logps": "ref_log_prob",
    "sampling_per_token_logps": "rollout_log_probs",
    "importance_sampling_ratio": "rollout_is_weights",
}
"""TRL's inputs, and what events call them."""
_OF_PROMPT = ("prompt_ids", "prompt_mask")
Rows = dict[str, torch.Tensor]


def rows_of(step: TrlStep) -> Rows:
    """This rank's rows, on the CPU: (R, P) or (R, T)."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for index, inputs in enumerate(step.inputs):
        mask = mask_of(inputs)
        values = {ours: inputs[theirs] for theirs, ours in _NAMES.items() if inputs.get(theirs) is not None}
        values |= {"response_mask": mask, "old_log_probs": step.old_log_prob(index)}
        if "num_items_in_batch" in inputs:  # tokens of the whole generation, which some losses divide by
            values["num_items_in_batch"] = inputs["num_items_in_batch"].expand(len(mask))
        if REWARD_KEY in inputs:
            first = torch.zeros_like(mask[:1]).index_fill(1, torch.tensor([0], device=mask.device), 1)
            values["token_level_scores"] = inputs[REWARD_KEY].unsqueeze(1) * first
        for name, value in values.items():
            wide = value if name in _OF_PROMPT else value.view(len(mask), -1).expand_as(mask)
            rows[name].append(wide.detach().cpu())
    return {name: _joined(name, parts) for name, parts in rows.items()}


def view_of(by_rank: Sequence[Rows]) -> BatchView:
    """All ranks' rows, one rank after the other."""
    rows = {name: _joined(name, [of_rank[name] for of_rank in by_rank]) for name in by_rank[0]}
    prompts, prompt_mask = rows.pop("prompt_ids"), rows.pop("prompt_mask")
    rows["input_ids"] = torch.cat([prompts, rows["responses"]], 1)
    rows["attention_mask"] = torch.cat([prompt_mask, rows.pop("completion_mask")], 1)
    rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    uids = [_uid(ids[mask.bool()]) for ids, mask in zip(prompts, prompt_mask, strict=True)]
    return BatchView(rows, {"uid": uids, "sequence_id": sequence_ids(uids)})


def brief_of(step: TrlStep) -> list[tuple[int, float]]:
    """Of each row of this rank how many tokens it has and their median advantage: enough where nothing spiked."""
    masks = [mask_of(inputs).bool() for inputs in step.inputs]
    pairs = []
    for mask, inputs in zip(masks, step.inputs, strict=True):
        advantages = inputs["advantages"].view(len(mask), -1).expand(mask.shape)
        kept = [row[of_row] for row, of_row in zip(advantages, mask, strict=True)]
        pairs += [(len(row), float(row.median()) if len(row) else 0.0) for row in kept]
    return pairs


def brief_view(by_rank: Sequence[list[tuple[int, float]]]) -> BatchView:
    """A batch of these lengths and advantages."""
    lengths, advantages = torch.tensor([row for of_rank in by_rank for row in of_rank]).T
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    return BatchView({"response_mask": mask, "advantages": advantages.unsqueeze(1).expand_as(mask)}, {})


def _uid(prompt: torch.Tensor) -> str:
    """TRL names no prompts; equal ones are siblings."""
    return hashlib.sha1(prompt.numpy().tobytes()).hexdigest()[:8]


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """One below the other, padded to the widest: prompts on the left."""
    width = max(part.shape[1] for part in parts)
    missing = [(width - part.shape[1], 0) if name in _OF_PROMPT else (0, width - part.shape[1]) for part in parts]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, missing, strict=True)])
