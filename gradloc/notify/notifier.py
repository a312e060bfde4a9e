# SPDX-License-Identifier: Apache-2.0
"""Announce events that are on disk: on the console, in trackers, by alerts."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..record import Event
from ..record.store import plain
from .alerts import post, run_command
from .background import Background, error_text
from .config import NotifyConfig
from .lines import announcement, not_written, opening_command
from .trackers import ALERTS, SENDERS, slow_sender, upload_folder

_GRACE_S = 2.0
"""Seconds beyond ``notify.timeout_s`` for a job that timed out to write its line in the log."""

logger = logging.getLogger(__name__)

Written = Sequence[tuple[Event, str]]
"""Events, and why each could not be written: empty for one that was."""


class Notifier:
    """Announces to console and trackers at once, and sends slow messages from threads of its own.

    It never raises, waits for a network or draws a random number, so it cannot affect training.

    Args:
        settings: ``gradloc.notify``.
        root: the folder of the events, absolute.
        keeps_text: whether events hold text; without, no folder and no record leaves the machine.
    """

    def __init__(self, settings: NotifyConfig, root: Path, keeps_text: bool = True):
        self.settings, self.root = settings, root
        self.trackers: dict[str, Any] = {}
        """verl's open clients by name: ``Tracking.logger``."""
        self._uploads = settings.artifact and keeps_text
        self._last_alert, self._num_missed = -math.inf, 0
        self._held: Written = ()
        """Events of the last update without an alert."""
        # one thread each, so that a webhook that hangs does not keep a tracker waiting
        patience_s = settings.timeout_s + _GRACE_S
        self._slow_trackers = Background("gradloc-trackers", patience_s)
        self._alerts = Background("gradloc-alerts", patience_s)

    def announce(self, written: Written, step: int) -> None:
        """Announce the events of one update, if there are any.

        Args:
            written: the events, and why each could not be written.
            step: the trainer's global step, for the trackers' axis.
        """
        if not written:
            return
        self._try("the console", partial(self._print, written))
        for name, client in self.trackers.items():
            self._try(name, partial(self._log_to, name, client, written, step))
        self._try("the alerts", partial(self._alert, written))

    def finish(self) -> None:
        """Send the alerts held back, and wait for all jobs, a bit longer than ``timeout_s`` each."""
        if self._held:
            self._last_alert, self._num_missed = -math.inf, self._num_missed - len(self._held)
            self._try("the alerts", partial(self._alert, self._held))
        self._slow_trackers.finish()
        self._alerts.finish()

    def _try(self, receiver: str, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:
            logger.error("gradloc: notifying %s failed (%s); training goes on", receiver, error_text(error))

    def _print(self, written: Written) -> None:
        for event, why in written:
            where = not_written(self.root, why) if why else opening_command(event, self.root)
            print(f"gradloc: {announcement(event)}\ngradloc: {where}", flush=True)

    def _log_to(self, name: str, client: Any, written: Written, step: int) -> None:
        events = [event for event, _ in written]
        send_slowly = slow_sender(name, self._uploads)
        if send_slowly is not None:
            self._slow_trackers.submit(f"the message to {name}", partial(send_slowly, events))
        if name in ("wandb", "vemlp_wandb") and self._uploads:
            for folder in (self._folder(event) for event, why in written if not why):
                self._slow_trackers.submit(f"the upload to {name}", partial(upload_folder, client, folder))
        if name in SENDERS:
            SENDERS[name](client, events, step)

    def _alert(self, written: Written) -> None:
        """Alert about the first event, unless the last alert was too recent; the next one counts those left out."""
        settings = self.settings
        trackers = [name for name in self.trackers if settings.tracker_alerts and name in ALERTS]
        if not (trackers or settings.command or settings.webhook):
            return
        now = time.monotonic()
        if now - self._last_alert < settings.min_interval_s:
            self._num_missed += len(written)
            self._held = written
            return
        num_more = len(written) - 1 + self._num_missed
        self._last_alert, self._num_missed, self._held = now, 0, ()
        event, why = written[0]
        run = "/".join(part for part in (event.run.project, event.run.experiment) if part) or "a run"
        text, folder = announcement(event), str(self._folder(event))
        if num_more:
            text += f" (and {num_more} more since the last alert)"
        if why:
            text, folder = f"{text}; {not_written(self.root, why)}", ""
        for name in trackers:
            alert = partial(ALERTS[name], self.trackers[name], f"gradloc: {run}", text)
            self._submit_alert(f"the alert of {name}", alert)
        if settings.command:
            document = json.dumps(plain(event), allow_nan=False)
            environment = {"GRADLOC_TEXT": text, "GRADLOC_EVENT_DIR": folder}
            command = partial(run_command, settings.command, document, environment, settings.timeout_s)
            self._submit_alert("gradloc.notify.command", command)
        if settings.webhook:
            message = {
                "text": f"{run}: {text}",  # what Slack shows; Discord: content. No context of the token leaves here
                "content": f"{run}: {text}",
                "event_id": event.event_id,
                "global_step": event.step.global_step,
                "taken": event.action.taken,
                "path": folder or None,
            }
            self._submit_alert("gradloc.notify.webhook", partial(post, settings.webhook, message, settings.timeout_s))

    def _submit_alert(self, what: str, alert: Callable[[], None]) -> None:
        """Send an alert from its thread; after a failure the next event is not held back."""

        def send() -> None:
            try:
                alert()
            except Exception:
                self._last_alert = -math.inf
                raise

        self._alerts.submit(what, send)

    def _folder(self, event: Event) -> Path:
        return self.root / (event.folder or "")
