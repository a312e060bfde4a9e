# SPDX-License-Identifier: Apache-2.0
"""The events on disk: each is completed with what only the driver knows, and written once."""

import logging
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from ..core.ranks import Ranks
from ..record import BundleMeta, Event, Run
from ..record.origin import now
from ..record.store import EventStore
from ..tell.background import said_of
from .batch import BatchView
from .complete import bundle_tensors, complete_event, complete_sequences
from .pictures import Album
from .wire import RawEvent

logger = logging.getLogger(__name__)


class EventWriter:
    """Writes a run's events, see :class:`~.driver.Driver`. Whatever fails is logged and counted; training goes on."""

    def __init__(self, settings: Any, run: Run, tokenizer: Any, trained: dict[str, Any], model: str):
        self.evidence, self.run, self.trained, self.model = settings.evidence, run, trained, model
        self.tokenizer = tokenizer if self.evidence.text == "on" else None
        self.store = EventStore(settings.root)
        self.num_failures = 0
        self.last_checkpoint: str | None = None
        """The newest that the trainer has written or resumed from."""
        self._endings: Counter[int] = Counter()

    def write(self, raw: RawEvent, batch: BatchView, over_run: dict[str, float]) -> tuple[Event, str]:
        """Write one event of this whole batch, which is ``over_run`` times what is typical of the run, by name.

        Returns:
            Its record, as far as it could be completed, and why writing failed ("" where it did not).
        """
        event = raw.event
        try:
            event = self._complete(raw, batch, over_run)
            return self._keep(event, raw, batch), ""
        except Exception as error:
            self.num_failures += 1
            what = "gradloc: writing an event of step %s to %s failed (%s); training goes on"
            is_known = isinstance(error, OSError)  # such as a full disk, which needs no traceback
            logger.error(what, event.step.global_step, self.store.root, said_of(error), exc_info=not is_known)
            return event, said_of(error)

    def _complete(self, raw: RawEvent, batch: BatchView, over_run: dict[str, float]) -> Event:
        step = raw.event.step
        completed = complete_event(
            raw,
            self.store.new_id(step.global_step, step.epoch, step.mini_batch, self.model),
            self.run,
            batch,
            self.tokenizer,
            self.evidence.context_tokens,
            over_run,
            self.last_checkpoint,
            self._endings,
        )
        return replace(completed, time=now())

    def _keep(self, event: Event, raw: RawEvent, batch: BatchView) -> Event:
        album = Album()
        documents: dict[str, Any] = {"sequences": complete_sequences(raw, event.event_id, batch, self.tokenizer, album)}
        tensors: dict[str, torch.Tensor] = {}
        root, max_gb = self.store.root, self.evidence.max_gb
        has_bundle = self.evidence.bundle != "off" and raw.layout
        if has_bundle and self.store.size_gb() >= max_gb:
            logger.warning("gradloc: %s holds gradloc.evidence.max_gb=%s or more: no replay bundle", root, max_gb)
        elif has_bundle:
            tensors, layout, note = bundle_tensors(raw, batch)
            documents["meta"] = BundleMeta(
                actor=self.trained,
                temperature=raw.temperature,
                on_policy=raw.on_policy,
                checkpoint=raw.checkpoint,
                fingerprint=raw.fingerprint,
                layout=layout,
                event=event,
                multi_modal_note=note,
            )
        event = replace(event, folder=self.store.write_folder(event.event_id, tensors, documents, album.files))
        self.store.append(event)
        return event


def events_weights_folder(settings: Any, global_step: int, ranks: Ranks) -> str | None:
    """Where the weights of an event go; None where none are to be saved, or ``evidence.max_gb`` is reached.

    All ranks call this together.
    """
    if settings.evidence.checkpoint != "before_step":
        return None
    root = settings.root
    size_gb = ranks.agree(lambda: EventStore(root).size_gb() if ranks.is_first else 0.0)
    if ranks.max([size_gb])[0] >= settings.evidence.max_gb:
        logger.warning("gradloc: %s holds gradloc.evidence.max_gb or more, so no weights are saved", root)
        return None
    return os.path.join(root, "weights", f"global_step_{global_step}", "actor")
