# SPDX-License-Identifier: Apache-2.0
"""An adapter in one file: it lets the plain torch loop of ``test_toy.py`` localize. CONTRIBUTING walks through it."""

from contextlib import nullcontext
from typing import Any

import torch

from gradloc.config import ActionConfig, GradLocConfig, TriggerConfig
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.step import Details, Numerics, Outputs, Recorded, RngState, record
from gradloc.loop.batch import BatchView
from gradloc.loop.driver import Driver
from gradloc.loop.localizer import Localizer
from gradloc.record import Run


class Watch:
    """The adapter: the actor's powers on the rank's side, and the driver; in one process both are here."""

    scales_loss = False
    takes_what_is_not_finite = True

    def __init__(self, trainer: Any, dump_dir: str, mode: str, tau: float):
        self.trainer, self.clip_limit, self.optimizer = trainer, trainer.grad_clip, trainer.optimizer
        settings = GradLocConfig(dump_dir=dump_dir, trigger=TriggerConfig(tau=tau), action=ActionConfig(mode))
        self.localizer = Localizer(self, Ranks(), settings)
        run = Run("tests", "toy")
        self.driver = Driver(settings, tokenizer=None, run=run, trained={})
        self.metrics: dict[str, list[float]] = {}

    def clip(self) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), self.clip_limit)

    def save_weights(self, global_step: int) -> None:
        """This trainer has no format for them."""

    def begin(self, batch: dict[str, torch.Tensor], number: int) -> None:
        policy = self.driver.before_update([int(batch["response_mask"].sum())], number)
        self.localizer.begin_update(policy, GradientSpace(self.trainer.model))
        self.step = ToyStep(self.trainer, int(batch["response_mask"].sum()))
        self.localizer.begin_mini_batch(self.step)

    def end(self, batch: dict[str, torch.Tensor]) -> None:
        self.localizer.end_update()
        self.metrics = self.driver.after_update([self.localizer.report()], BatchView(batch, {}))


class ToyStep:
    """One optimizer step that can be run again: the :class:`~gradloc.core.step.TrainingStep` of this trainer."""

    numerics = Numerics()

    def __init__(self, trainer: Any, num_tokens: int):
        self.trainer, self.num_tokens = trainer, num_tokens
        self._rows: list[dict[str, torch.Tensor]] = []
        self._starts: list[int] = []
        self._recorded: list[Recorded] = []

    def before_forward(self, rows: dict[str, torch.Tensor], start: int) -> None:
        self._rows.append(rows)
        self._starts.append(start)
        self._recorded.append(Recorded(RngState(torch.device("cpu"))))

    def after_forward(self, log_prob: torch.Tensor) -> None:
        record(self._recorded[-1], Outputs(log_prob))

    num_micro_batches = property(lambda self: len(self._rows))
    recorded = property(lambda self: self._recorded.__getitem__)

    def rows(self, index: int) -> list[int]:
        return [self._starts[index] + row for row in range(len(self._rows[index]["responses"]))]

    def token_mask(self, index: int) -> torch.Tensor:
        return self._rows[index]["response_mask"].bool()

    def details(self, index: int) -> Details:
        return Details(self._rows[index]["old_log_probs"], self.token_mask(index) / self.num_tokens)

    def in_pass(self, is_last: bool) -> Any:
        return nullcontext()

    def forward_bytes(self) -> int:
        return 0

    def forward(self, index: int, needs_entropy: bool = False) -> Outputs:
        logits = self.trainer.logits(self._rows[index]).log_softmax(-1)
        chosen = logits.gather(-1, self._rows[index]["responses"][..., None]).squeeze(-1)
        return Outputs(chosen, -(logits.exp() * logits).sum(-1) if needs_entropy else None)
