# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor.gradloc.notify``, validated when the run starts."""

import shlex
from dataclasses import dataclass
from typing import Any

from ..checks import SWITCH, Allowed, closed, number, or_null, setting

_KEY = "actor_rollout_ref.actor.gradloc.notify"
WEBHOOK_IS_NO_URL = (
    f"{_KEY}.webhook must be null, env:NAME (the environment variable that holds the URL) or file:PATH (a file that "
    "does), not the URL itself: verl prints its config and sends it to the trackers."
)


def _is_command(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(shlex.split(value))
    except ValueError:
        return False


_COMMAND = Allowed("a command line whose quotes are closed", _is_command)


@closed(_KEY)
@dataclass(frozen=True)
class NotifyConfig:
    """Who hears of an event, apart from the console and the run's trackers."""

    artifact: bool = setting(True, SWITCH)
    """Whether W&B also gets the event's folder and MLflow its record; never with ``evidence.text=off``, since token ids
    can be decoded."""
    tracker_alerts: bool = setting(False, SWITCH)
    """Whether W&B and trackio alert (``wandb.alert``, ``trackio.alert``)."""
    command: str | None = setting(None, or_null(_COMMAND))
    """A command to run, without a shell, with the event as JSON on its stdin."""
    webhook: str | None = None
    """``env:NAME`` or ``file:PATH``: where the URL is that gets a short JSON message."""
    timeout_s: float = setting(10.0, number("in (0, 600]", lambda value: 0 < value <= 600))
    """Seconds after which a command is killed and a webhook given up."""
    min_interval_s: float = setting(300.0, number("a number from 0 on", lambda value: value >= 0))
    """Between two alerts (of trackers, command, webhook); the next one counts what it missed."""

    def check(self) -> None:
        """Where the URL is; never with what was found: that may be the secret."""
        webhook = self.webhook
        is_place = isinstance(webhook, str) and webhook.partition(":")[0] in ("env", "file") and "://" not in webhook
        if not (webhook is None or is_place and webhook.partition(":")[2].strip()):
            raise ValueError(WEBHOOK_IS_NO_URL)
