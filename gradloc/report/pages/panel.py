# SPDX-License-Identifier: Apache-2.0
"""Make the parts of an event's page beyond its document: sequences token by token, pictures, drawings."""

import base64
from dataclasses import replace

from ...explain.aftermath import impact_of
from ...explain.numbers import number
from ...explain.text import one_line
from ...record import Event
from ...record.bundle import Sequence
from ...record.columns import COLUMNS
from ..figures import drawings
from ..runs import tokens
from ..runs.events import read_pictures, read_sequences
from ..runs.run import RunFolder
from .document import Table

PICTURE_BYTES = 3_000_000
"""Most bytes of pictures per event."""


class Panel:
    """An event's sequences and drawings; ``note`` and ``picture_note`` say why some are missing.

    The page can carry ``budget`` tokens of the event, and can show ``shown`` of them at first.
    """

    def __init__(self, event: Event, run: RunFolder, budget: int, shown: int):
        root = run.events_root or run.path
        sequences, self.note = read_sequences(root, event)
        sequences = [_with_trusted_shares(event, sequence) for sequence in sequences]
        self.shades = tokens.shade(sequences)
        culprits, count = tokens.by_sequence(event.culprits), max(len(sequences), 1)
        self.sequences = []
        for sequence in sequences:
            own = culprits.get(tokens.place(sequence), ())
            self.sequences.append(tokens.view(sequence, own, budget // count, max(shown // count, 20)))
        with_culprits = [view.sequence for view in self.sequences if view.culprits]
        pictures, self.picture_note = read_pictures(root, event, with_culprits, PICTURE_BYTES)
        self.pictures = {
            name: f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
            for name, content in pictures.items()
        }
        self.siblings = _siblings(event, sequences)
        self.heat, self.layers = drawings.heat_map(event), drawings.layer_norms(event)
        parts = impact_of(event, run.metrics.known).parts
        self.sparks = [(part, *drawings.spark(part, event.step.global_step)) for part in parts]

    def level(self, sequence: int, position: int) -> str:
        """Return the letter of a token's shade when the page opens."""
        return self.shades[0].levels[sequence][position] if self.shades else tokens.NOT_KNOWN


def _with_trusted_shares(event: Event, sequence: Sequence) -> Sequence:
    """Drop shares that are not trusted, and use a culprit's own share where it was measured."""
    if "share" not in sequence.columns:
        return sequence
    summed = {name for name, column in COLUMNS.items() if column.is_summed}
    shares = {name: values for name, values in sequence.columns.items() if name in summed}
    others = {name: values for name, values in sequence.columns.items() if name not in summed}
    if event.shares is not None and not event.shares.is_trusted:
        return replace(sequence, columns=others)
    measured = {
        culprit.positions[0]: {"share": culprit.share, "share_error": culprit.share_error or 0.0}
        for culprit in tokens.by_sequence(event.culprits).get(tokens.place(sequence), ())
        if len(culprit.positions) == 1 and culprit.share is not None
    }
    for name, values in shares.items():
        shares[name] = tuple(measured[at][name] if at in measured else value for at, value in enumerate(values))
    return replace(sequence, columns=shares | others)


def _siblings(event: Event, sequences: list[Sequence]) -> list[tuple[str, Table]]:
    """Return each culprit's prompt with a table of its rollouts, the culprit's own first."""
    tables = []
    for culprit in {culprit.sequence_id: culprit for culprit in event.culprits if culprit.siblings}.values():
        own = next((sequence for sequence in sequences if sequence.sequence_id == culprit.sequence_id), None)
        rollouts = [(culprit.sequence_id, culprit.reward, culprit.at("advantage"), len(own) if own else None)]
        for sibling in culprit.siblings or ():
            rollouts.append((sibling.sequence_id, sibling.reward, sibling.advantage, sibling.num_tokens))
        cells = [((name or "").rpartition(":")[2] or "–", *map(number, numbers)) for name, *numbers in rollouts]
        prompt = one_line(culprit.prompt or "a prompt", 80, keep="end")  # where a chat has its question
        tables.append((prompt, Table(("rollout", "reward", "advantage", "tokens"), cells)))
    return tables
