# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor.gradloc.notify``, validated when the run starts."""

import shlex
from dataclasses import dataclass
from typing import Any

from ..checks import closed, is_number, require

__all__ = ["NotifyConfig", "WEBHOOK_IS_NO_URL"]

_KEY = "actor_rollout_ref.actor.gradloc.notify"
WEBHOOK_IS_NO_URL = (
    f"{_KEY}.webhook must be null, env:NAME (the environment variable that holds the URL) or file:PATH (a file that "
    "does), not the URL itself: verl prints its config and sends it to the trackers."
)
"""Never with what was found: that may be the secret."""


def _require(ok: bool, name: str, expected: str, found: Any) -> None:
    require(ok, f"{_KEY}.{name}", expected, found)


@closed(_KEY)
@dataclass(frozen=True)
class NotifyConfig:
    """Who is told of an event, beside the console and the run's trackers."""

    artifact: bool = True
    """Whether W&B also gets the event's folder; never with ``evidence.text=off``, since token ids can be decoded."""
    tracker_alerts: bool = False
    """Whether W&B and trackio alert (``wandb.alert``, ``trackio.alert``)."""
    command: str | None = None
    """A command to run, without a shell, with the event as JSON on its stdin."""
    webhook: str | None = None
    """``env:NAME`` or ``file:PATH``: where the URL is that gets a short JSON message."""
    timeout_s: float = 10.0
    """Seconds after which a command is killed and a webhook given up."""
    min_interval_s: float = 300.0
    """Between two alerts (of trackers, command, webhook); the next one counts what it missed."""

    def __post_init__(self) -> None:
        for name in ("artifact", "tracker_alerts"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))
        _require(
            self.command is None or _is_command(self.command),
            "command",
            "null or a command line whose quotes are closed",
            self.command,
        )
        webhook = self.webhook
        is_place = isinstance(webhook, str) and webhook.partition(":")[0] in ("env", "file") and "://" not in webhook
        if not (webhook is None or is_place and webhook.partition(":")[2].strip()):
            raise ValueError(WEBHOOK_IS_NO_URL)
        _require(is_number(self.timeout_s) and 0 < self.timeout_s <= 600, "timeout_s", "in (0, 600]", self.timeout_s)
        _require(
            is_number(self.min_interval_s) and self.min_interval_s >= 0,
            "min_interval_s",
            "a number from 0 on",
            self.min_interval_s,
        )


def _is_command(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(shlex.split(value))
    except ValueError:
        return False
