# SPDX-License-Identifier: Apache-2.0
"""Tells events to everybody who is to know, once they are on disk."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..record import Event
from ..record.store import plain
from .alerts import Limiter, post, run_command
from .background import Background, said_of
from .config import NotifyConfig
from .lines import announcement, not_written, opening_command
from .trackers import ALERTS, FORMS, later_of, upload_folder

_GRACE_S = 2.0
"""So that what was given up after ``notify.timeout_s`` still gets its line in the log."""

logger = logging.getLogger(__name__)


class Teller:
    """The console and the trackers are told at once; what may take long, from threads of its own.

    Nothing raises, nothing waits for a network, and no random number is drawn: training cannot notice.

    Args:
        settings: ``gradloc.notify``.
        root: the folder of the events, absolute.
        keeps_text: whether the events hold text; without, no folder leaves the machine.
    """

    def __init__(self, settings: NotifyConfig, root: Path, keeps_text: bool = True):
        self.settings, self.root = settings, root
        self.trackers: dict[str, Any] = {}
        """verl's open clients by name: ``Tracking.logger``."""
        self._uploads = settings.artifact and keeps_text
        self._limiter = Limiter(settings.min_interval_s)
        # one thread each, so that a webhook that hangs does not keep a tracker waiting
        patience_s = settings.timeout_s + _GRACE_S
        self._slow_trackers = Background("gradloc-trackers", patience_s)
        self._alerts = Background("gradloc-alerts", patience_s)

    def tell(self, events: list[Event], step: int, lost: Sequence[str] = ()) -> None:
        """Tell the events of one update.

        Args:
            events: as written; nothing happens when there are none.
            step: the trainer's global step, for the trackers' axis.
            lost: why each could not be written; empty for one that was, and where none is given.
        """
        if not events:
            return
        whys = list(lost) or [""] * len(events)
        self._try("the console", partial(self._print, events, whys))
        for name, client in self.trackers.items():
            self._try(name, partial(self._tell_tracker, name, client, events, whys, step))
        self._try("the alerts", partial(self._alert, events, whys))

    def finish(self) -> None:
        """The run is about to end: wait for what is still to be told, a bit longer than ``notify.timeout_s`` each."""
        self._slow_trackers.finish()
        self._alerts.finish()

    def _try(self, whom: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            logger.error("gradloc: telling %s failed (%s); training goes on", whom, said_of(error))

    def _print(self, events: list[Event], whys: list[str]) -> None:
        for event, why in zip(events, whys, strict=True):
            where = not_written(self.root, why) if why else opening_command(event, self.root)
            print(f"gradloc: {announcement(event)}\ngradloc: {where}", flush=True)

    def _tell_tracker(self, name: str, client: Any, events: list[Event], whys: list[str], step: int) -> None:
        later = later_of(name)
        if later is not None:
            self._slow_trackers.submit(f"telling {name}", partial(later, events))
        if name in ("wandb", "vemlp_wandb") and self._uploads:
            for event in (event for event, why in zip(events, whys, strict=True) if not why):
                upload = partial(upload_folder, client, self._folder(event))
                self._slow_trackers.submit(f"the upload to {name}", upload)
        if name in FORMS:
            FORMS[name](client, events, step)

    def _alert(self, events: list[Event], whys: list[str]) -> None:
        settings, first = self.settings, events[0]
        alerting = [name for name in self.trackers if settings.tracker_alerts and name in ALERTS]
        if not (alerting or settings.command or settings.webhook):
            return
        missed = self._limiter.admit(len(events))
        if missed is None:
            return
        more = len(events) - 1 + missed
        text = announcement(first) + (f" (and {more} more since the last alert)" if more else "")
        text += f"; {not_written(self.root, whys[0])}" if whys[0] else ""
        for name in alerting:
            alert = partial(ALERTS[name], self.trackers[name], f"gradloc: {self._run_name(first)}", text)
            self._alerts.submit(f"the alert of {name}", alert)
        if settings.command:
            said = json.dumps(plain(first), allow_nan=False)
            folder = "" if whys[0] else str(self._folder(first))
            environment = {"GRADLOC_TEXT": text, "GRADLOC_EVENT_DIR": folder}
            command = partial(run_command, settings.command, said, environment, settings.timeout_s)
            self._alerts.submit("gradloc.notify.command", command)
        if settings.webhook:
            message = self._message(first, text) | ({"path": None} if whys[0] else {})
            self._alerts.submit("gradloc.notify.webhook", partial(post, settings.webhook, message, settings.timeout_s))

    def _message(self, event: Event, text: str) -> dict[str, Any]:
        """``text`` is what Slack shows, ``content`` Discord; no context of the token leaves the machine."""
        text = f"{self._run_name(event)}: {text}"
        return {
            "text": text,
            "content": text,
            "event_id": event.event_id,
            "global_step": event.step.global_step,
            "taken": event.action.taken,
            "path": str(self._folder(event)),
        }

    def _folder(self, event: Event) -> Path:
        return self.root / (event.folder or "")

    def _run_name(self, event: Event) -> str:
        return "/".join(part for part in (event.run.project, event.run.experiment) if part) or "a run"
