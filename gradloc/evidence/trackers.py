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
"""Tells events to the trackers that the run uses. No torch here.

Trackers are imported when there is something to tell; one that fails is logged and never reaches training.
"""

import html
import logging
import os
from typing import Any

from .record import Culprit, Event
from .verdict import quote

__all__ = ["announce"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_COLUMNS = ("event", "step", "token", "position", "sequence", "rank", "micro_batch", "share", "grad_norm", "advantage")


def announce(events: list[Event], backends: Any, step: int) -> None:
    """Tell events to the console, W&B and TensorBoard, where the run uses them.

    Args:
        events: as written; nothing happens when there are none.
        backends: ``trainer.logger``, a name or a list of names.
        step: the trainer's global step, for the trackers' axis.
    """
    if not events:
        return
    names = [backends] if isinstance(backends, str) else list(backends or [])
    for name, tell in (("console", _to_console), ("wandb", _to_wandb), ("tensorboard", _to_tensorboard)):
        if name not in names:
            continue
        try:
            tell(events, step)
        except Exception:
            logger.exception("gradloc: telling an event to %s failed; training goes on", name)


def _to_console(events: list[Event], step: int) -> None:
    for event in events:
        print(f"gradloc: {event.verdict}", flush=True)


def _to_wandb(events: list[Event], step: int) -> None:
    import wandb

    if wandb.run is None:
        return
    rows = [_row(event, culprit) for event in events for culprit in event.culprits]
    paragraphs = "".join(f"<p>{html.escape(str(event.verdict))}</p>" for event in events)
    payload = {"gradloc/verdict": wandb.Html(paragraphs), "gradloc/culprits": wandb.Table(list(_COLUMNS), rows)}
    # with its step given, the entry is joined with the step's metrics, which the trainer logs later
    wandb.log(payload, step=step)


def _to_tensorboard(events: list[Event], step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = events[0].run
    root = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{run.project}/{run.experiment}")
    # a folder of its own: TensorBoard follows the newest file of a folder and would drop the run's scalars
    with SummaryWriter(os.path.join(root, "gradloc")) as writer:
        for event in events:
            writer.add_text("gradloc/verdict", _escape_markdown(str(event.verdict)), step)


def _row(event: Event, culprit: Culprit) -> list[Any]:
    return [
        event.event_id,
        event.step.global_step,
        quote(culprit),
        culprit.positions[0],
        culprit.sequence_id,
        culprit.rank,
        culprit.micro_batch,
        culprit.share,
        culprit.grad_norm,
        culprit.advantage,
    ]


def _escape_markdown(text: str) -> str:
    return "".join("\\" + char if char in "\\`*_{}[]()#+-.!|<>~$" else char for char in text)
