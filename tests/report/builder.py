# SPDX-License-Identifier: Apache-2.0
"""Runs for the tests, written as the trainer writes them.

Their records are the trainer's own dataclasses; what a test changes is changed as JSON, so that it may be wrong.
"""

import json
import math
from pathlib import Path
from typing import Any

from gradloc import record
from gradloc.explain.story import verdict_sentences
from gradloc.record import Event, version1
from gradloc.record.bundle import Sequence
from gradloc.record.columns import STORED
from gradloc.record.reading import read
from gradloc.record.store import plain

REPO = Path(__file__).resolve().parents[2]
_MARKUP = "</script><img src=x onerror=alert(1)>", '"><b>{{ 7 * 7 }}'
SCHEMAS = REPO / "schema"
HOSTILE = [_MARKUP[0], "\u202eevil", "\ufffd", "🦜", "漢字", "\n", _MARKUP[1], "\x1b[31mred"]
VISIBLE = [_MARKUP[0], "⟨U+202E⟩evil", "\ufffd", "🦜", "漢字", "↵\n", _MARKUP[1], "⟨U+001B⟩[31mred"]
UNTRUSTED = {
    "closure": 1.855,
    "closure_error": 0.12,
    "is_trusted": False,
    "micro_batches": [[0.0, 0.01], [0.0, 0.0], [-0.05, 1.895]],
}
"""Shares that do not add up."""


def make_culprit(position: int = 3, token: str = " is", rank: int = 1, **changes: Any) -> dict:
    """A culprit's record; a change may name a number of its token as version 1 does."""
    culprit = record.Culprit(
        span="token",
        rank=rank,
        micro_batch=2,
        micro_batch_row=0,
        row=12,
        positions=(position,),
        peak=position,
        sequence_id="3c0f6a52-uid-of-a-prompt-in-verl:1",
        data_source="arithmetic",
        reward=1.0,
        token_ids=(1000 + position,),
        tokens=(token,),
        text_before="the answer",
        text_after=" 60.",
        prompt="What is 20+40?",
        values={
            "log_prob": -4.6,
            "old_log_prob_used": -4.6,
            "old_log_prob": -4.8,
            "rollout_log_prob": -4.7,
            "advantage": 10000.0,
            "entropy": 1.25,
            "coefficient": -73.5,
            "loss_weight": 0.007,
        },
        sequence_ratio=1.0,
        grad_norm=650.3,
        threshold=4.7,
        share=0.75,
        layers={"embedding": 395.7, "layer 0": 231.7, "layer 10": 203.6, "head": 413.7},
        cause=record.Cause(
            "extreme_advantage", {"advantage_over_typical": 14577.6, "ratio_over_typical": 1.0, "kl": None}
        ),
    )
    return version1.culprit(plain(culprit) | changes)


def make_event(step: int = 5, /, culprits: list[dict] | None = None, **changes: Any) -> dict:
    """An event's record with its verdict; its path is a small search.

    Of a part that is a dict, what is given is changed; ``{}`` is none.
    """
    event_id = f"step{step:06d}-epoch0-mini0"
    norm = 747.66
    made = Event(
        event_id=event_id,
        run=record.Run("tests", "report"),
        step=record.Step(global_step=step, num_mini_batches=1, num_micro_batches=4, world_size=2, dp_size=2, sp_size=1),
        trigger=record.Trigger(kind="fixed", grad_norm=norm, threshold=52.26, tau=640.0, num_tokens=150),
        search=record.Search(
            strategy="bisect",
            status="found",
            stop_reason="every part over its threshold was followed to its end",
            tau=640.0,
            budget=128,
            forwards=24,
            backwards=24,
            seconds=0.65,
            path=make_path(),
        ),
        certificate=record.Certificate(
            norm_before=norm,
            norm_after=0.77,
            error_bound=0.0007,
            threshold=52.26,
            method="swap",
            verdict="explained",
            reason="without the culprits the norm is under the threshold",
        ),
        action=record.Action(reason="the step goes on unchanged"),
        layers={"embedding": 459.6, "head": 480.8, "layer 0": 254.5, "layer 10": 227.5},
        kinds={"attention": 337.5, "mlp": 50.9},
        shares=record.Shares(closure=0.9998, micro_batches=((0.0, 0.01), (0.0, 0.0), (-0.05, 0.8))),
        batch=record.BatchStatistics(advantage=0.69, one_minus_prob=0.98, jacobian=9.8),
        folder=f"events/{event_id}",
    )
    event = plain(made) | {"culprits": [make_culprit()] if culprits is None else culprits}
    for name, part in changes.items():
        event[name] = event[name] | part if part and isinstance(part, dict) and event.get(name) else part
    if "verdict" not in changes:
        event["verdict"] = verdict_sentences(read(Event, event))
    return event


def make_path() -> tuple[record.PathEntry, ...]:
    """Two micro-batches, of which the second is searched down to one token."""

    def probe(phase, micro_batch, ranks, tokens, norm, verdict):
        return record.PathEntry(phase, micro_batch, ranks, tokens, 10, norm, 4.7, verdict)

    return (
        probe("micro_batch", 0, (0, 2), None, 0.2, "under"),
        probe("micro_batch", 2, (0, 2), None, 747.0, "split"),
        probe("rank", 2, (0, 1), None, 0.1, "under"),
        probe("rank", 2, (1, 2), None, 747.0, "split"),
        probe("token", 2, (1, 2), (0, 3), 0.1, "under"),
        probe("token", 2, (1, 2), (3, 6), 747.0, "split"),
        probe("token", 2, (1, 2), (3, 4), 747.0, "culprit"),
        probe("token", 2, (1, 2), (4, 6), 0.1, "under"),
    )


def make_sequence(num: int = 8, tokens: list[str] | None = None, **changes: Any) -> dict:
    """A sequence of ``num`` tokens whose third position carries the spike."""
    tokens = tokens or [f" w{i}" for i in range(num)]
    num = len(tokens)
    sequence = Sequence(
        rank=1,
        micro_batch=2,
        micro_batch_row=0,
        row=12,
        sequence_id="3c0f6a52-uid-of-a-prompt-in-verl:1",
        data_source="arithmetic",
        prompt="What is 20+40?",
        token_ids=tuple(range(1000, 1000 + num)),
        tokens=tuple(tokens),
        columns={
            "response_mask": (1,) * num,
            "log_prob": tuple(-0.5 - 0.001 * (i % 97) for i in range(num)),
            "old_log_prob": tuple(-0.5 - 0.001 * (i % 89) for i in range(num)),
            "rollout_log_prob": tuple(-0.5 - 0.001 * (i % 83) for i in range(num)),
            "advantage": tuple(10000.0 if i == 3 else 0.5 for i in range(num)),
            "entropy": tuple(abs(math.sin(i)) for i in range(num)),
            "coefficient": tuple(-73.5 if i == 3 else -0.009 for i in range(num)),
            "share": tuple(0.75 if i == 3 else 0.001 * math.sin(i) for i in range(num)),
        },
    )
    made = plain(sequence)
    columns = made["columns"] | {name: changes.pop(name) for name in [*changes] if name in STORED}
    known = {name: values for name, values in columns.items() if values is not None}
    return made | changes | {"columns": known}


def make_metrics(num_steps: int = 20, spikes: tuple[int, ...] = (5,)) -> list[dict]:
    """What verl's file logger writes."""
    return [
        {
            "step": step,
            "data": {
                "actor/grad_norm": 100.0 if step in spikes else 1.0 + 0.1 * math.sin(step),
                "actor/grad_norm_max": 747.0 if step in spikes else 1.2 + 0.1 * math.sin(step),
                "critic/score/mean": 0.5 + 0.01 * step,
                "gradloc/failures": 0.0,
            },
        }
        for step in range(1, num_steps + 1)
    ]


def write_run(
    folder: Path,
    events: list[dict] | None = None,
    sequences: dict[str, list[dict]] | None = None,
    metrics: list[dict] | None = None,
) -> Path:
    """A run's folder.

    Args:
        folder: made when it does not exist.
        events: written to gradloc/events.jsonl; no file when None.
        sequences: per event id those of its sequences.json; one small one when left out.
        metrics: written to metrics.jsonl; no file when None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if metrics is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    root = folder / "gradloc"
    if events is not None:
        root.mkdir(exist_ok=True)
        (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for event in events or ():
        if event.get("folder"):
            found = (sequences or {}).get(event["event_id"], [make_sequence()])
            document = {"schema_version": 2, "event_id": event["event_id"], "sequences": found}
            (root / event["folder"]).mkdir(parents=True, exist_ok=True)
            (root / event["folder"] / "meta.json").write_text("{}")
            (root / event["folder"] / "sequences.json").write_text(json.dumps(document))
    return folder
