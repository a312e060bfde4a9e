# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor.gradloc.notify``, validated when the run starts."""

import shlex
from dataclasses import dataclass
from typing import Any

from ..checks import SWITCH, Allowed, checked, number, or_null, setting

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


@checked(_KEY)
@dataclass(frozen=True)
class NotifyConfig:
    """Alerts of an event, in addition to the console and the run's trackers."""

    artifact: bool = setting(True, SWITCH)
    """Send the event's folder to W&B and its record to MLflow; never with ``evidence.text=off``, since token ids can be
    decoded."""
    tracker_alerts: bool = setting(False, SWITCH)
    """Alert by ``wandb.alert`` and ``trackio.alert``, if you use these trackers."""
    command: str | None = setting(None, or_null(_COMMAND))
    """A command, run without a shell, that gets the event as JSON on its stdin."""
    webhook: str | None = None
    """Where to find the URL that gets a short JSON message: ``env:NAME`` or ``file:PATH``."""
    timeout_s: float = setting(10.0, number("in (0, 600]", lambda value: 0 < value <= 600))
    """Seconds before a command is killed or a webhook given up."""
    min_interval_s: float = setting(300.0, number("a number from 0 on", lambda value: value >= 0))
    """Seconds between two alerts of any kind; the next one counts those that it replaces."""

    def check(self) -> None:
        """Check that the webhook is a place, without quoting the value, which may be the secret."""
        webhook = self.webhook
        is_place = isinstance(webhook, str) and webhook.partition(":")[0] in ("env", "file") and "://" not in webhook
        if not (webhook is None or is_place and webhook.partition(":")[2].strip()):
            raise ValueError(WEBHOOK_IS_NO_URL)
