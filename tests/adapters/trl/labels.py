# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT and DPO trainers on the tiny model that spells, one token's log-prob spoiled in the loss of one step."""

from typing import Any

import torch
import trl
from accelerate.state import AcceleratorState

from gradloc.adapters.trl.trainer import WatchedTrainer, attach
from tests.adapters.trl import harness
from tests.detached import let_through

WORTH = 3e4
TEXTS = [" ".join(harness.LETTERS[(5 * i + j) % 30] for j in range(6 + i % 4)) for i in range(64)]


class Spoiling:
    """Spoil one token's log-prob at one step, as a part of the loss, behind the forward."""

    is_cut = False
    """Whether nothing flows back through that token: what ``mask`` must agree with."""
    num_calls = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        def spoiled(**named: Any) -> Any:
            outputs = model(**named)
            if not torch.is_grad_enabled() or not named.get("fused_lm_head"):
                return outputs
            self.num_calls += 1
            is_here = self.num_calls == 1 + 2 * (harness.SPIKE - 1) and self.accelerator.process_index == 0
            factor = torch.ones_like(outputs.log_probs)
            row, position = (named["labels"][:, 1:] != -100).nonzero()[3].tolist()
            if is_here:
                self.where = [(harness.SPIKE, row, position)]
                factor[row, position] = WORTH
                outputs.log_probs = let_through(factor == 1.0, outputs.log_probs) if self.is_cut else outputs.log_probs
            outputs.log_probs = outputs.log_probs * factor
            return outputs

        return super().compute_loss(spoiled, inputs, *args, **given)


class Own:
    """A loss of the logits and smoothed labels, with one token's weight spoiled at a step."""

    num_calls = 0

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        self.num_calls += 1
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", label_smoothing=0.1
        )
        weights = torch.ones_like(losses)
        row, position = (labels[:, 1:] != -100).nonzero()[3].tolist()
        if self.num_calls == 1 + 2 * (harness.SPIKE - 1):
            self.where = [(harness.SPIKE, row, position)]
            weights[row, position] = WORTH
        return (losses * weights).sum() / num_items_in_batch


def run(name: str, folder: str, base: str, gradloc: Any = None, is_own: bool = False, **config: Any) -> dict[str, Any]:
    """Train; what that leaves behind. ``name`` is ``stock``, ``without`` (the token), ``watched`` or ``attached``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(7)
    made, own = harness.save_model(f"{folder}-model"), Own() if is_own else None
    fronts = (*[WatchedTrainer] * (name == "watched"), *[Spoiling] * (not is_own))
    kind = type(f"Own{base}", (*fronts, getattr(trl, base)), {"is_cut": name == "without"})
    columns = {"text": TEXTS}
    if base == "DPOTrainer":
        columns = {"prompt": [t[:5] for t in TEXTS], "chosen": TEXTS, "rejected": TEXTS[::-1]}
    kind_of_args = {"SFTTrainer": trl.SFTConfig, "DPOTrainer": trl.DPOConfig}[base]
    settings = {"trigger": {"tau": 60.0}, **(gradloc or {})}
    more: dict[str, Any] = {"gradloc": settings} if name == "watched" else {}
    more |= {"compute_loss_func": own} if own else {}
    args = kind_of_args(**{"output_dir": folder, "max_length": 32, **harness.SMALL, "use_cpu": True, **config})
    trainer = harness.build(kind, made, {"dtype": torch.float32}, columns, args=args, **more)
    if name == "attached":
        attach(trainer, settings)
    found = harness.trained(trainer)
    return found | {"where": own.where} if own else found
