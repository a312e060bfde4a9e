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
"""An event in two sentences, and telling it to the trackers that the run uses. No torch here.

The first sentence says what spiked, which tokens did it and why; the second what the step would have been without
them. Trackers are imported when there is something to tell; one that fails is logged and never reaches training.
"""

import html
import logging
import math
import os
from typing import Any

from .numbers import number, percent

__all__ = ["announce", "verdict_sentences"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_CAUSES = {
    "token_mismatch": "the policy has moved away from the old one at this token: their ratio is {ratio_over_typical}",
    "sequence_mismatch": "the policy has moved away from the old one over the whole sequence: the ratio here is "
    "{ratio_over_typical}",
    "layer_heterogeneity": "some layers explode on it while the others stay calm",
    "large_jacobian": "the model is extremely sensitive there: the gradient of the log-prob alone is "
    "{jacobian_over_typical} times typical",
    "extreme_advantage": "the advantage there is {advantage_over_typical} times typical",
    "low_probability": "the model gave it a very low probability, which makes the gradient of its log-prob "
    "{jacobian_over_typical} times typical",
    "kl_term": "the KL penalty pulls it towards the reference policy with {kl_over_typical} times the usual force",
    "entropy_term": "the entropy term acts on it alone",
    "is_weight": "the weight of the rollout correction there is {is_weight_over_typical} times typical",
    "non_finite": "its loss has no finite gradient",
}

_COLUMNS = ("event", "step", "token", "position", "sequence", "rank", "micro_batch", "share", "grad_norm", "advantage")


def verdict_sentences(event: dict[str, Any]) -> str:
    """What happened, in two sentences for a newcomer.

    Args:
        event: the event record (schema version 1); numbers may be floats or spelled out ("NaN").

    Returns:
        Two sentences of printable characters; what a token holds beyond those is escaped.
    """
    return f"{_what(event)} {_without(event)}"


def announce(events: list[dict[str, Any]], backends: Any, step: int) -> None:
    """Tell events to the console, W&B and TensorBoard, where the run uses them.

    Args:
        events: event records as written; nothing happens when there are none.
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


def _text(event: dict[str, Any]) -> str:
    return event.get("verdict") or verdict_sentences(event)


def _to_console(events: list[dict[str, Any]], step: int) -> None:
    for event in events:
        print(f"gradloc: {_text(event)}", flush=True)


def _to_wandb(events: list[dict[str, Any]], step: int) -> None:
    import wandb

    if wandb.run is None:
        return
    rows = [_row(event, culprit) for event in events for culprit in event["culprits"]]
    paragraphs = "".join(f"<p>{html.escape(_text(event))}</p>" for event in events)
    payload = {"gradloc/verdict": wandb.Html(paragraphs), "gradloc/culprits": wandb.Table(list(_COLUMNS), rows)}
    # with its step given, the entry is joined with the step's metrics, which the trainer logs later
    wandb.log(payload, step=step)


def _to_tensorboard(events: list[dict[str, Any]], step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = events[0]["run"]
    root = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{run['project']}/{run['experiment']}")
    # a folder of its own: TensorBoard follows the newest file of a folder and would drop the run's scalars
    with SummaryWriter(os.path.join(root, "gradloc")) as writer:
        for event in events:
            writer.add_text("gradloc/verdict", _escape_markdown(_text(event)), step)


def _row(event: dict[str, Any], culprit: dict[str, Any]) -> list[Any]:
    return [
        event["event_id"],
        event["step"]["global_step"],
        _quote(culprit),
        culprit["positions"][0],
        culprit["sequence_id"],
        culprit["rank"],
        culprit["micro_batch"],
        *(_float(culprit[key]) for key in ("share", "grad_norm", "advantage")),
    ]


def _escape_markdown(text: str) -> str:
    return "".join("\\" + char if char in "\\`*_{}[]()#+-.!|<>~$" else char for char in text)


# ---- the first sentence


def _what(event: dict[str, Any]) -> str:
    trigger, culprits = event["trigger"], event["culprits"]
    norm, threshold = _float(trigger["grad_norm"]), _float(trigger["threshold"])
    start = f"At step {event['step']['global_step']} the gradient "
    if norm is None or not math.isfinite(norm):
        start += "was not finite"
    elif trigger["kind"] == "forced":
        start += f"norm was {_number(norm)} (a rehearsal: this step was asked for)"
    elif threshold:
        start += f"norm was {_number(norm)}, {_number(norm / threshold)} times the threshold of {_number(threshold)}"
    else:
        start += f"norm was {_number(norm)}"
    if not culprits:
        return f"{start}, and no token was found that carries it."
    return f"{start}: {_who(culprits)}, {_why(culprits)}."


def _who(culprits: list[dict[str, Any]]) -> str:
    first = max(culprits, key=_weight)
    shares = [_float(culprit["share"]) for culprit in culprits]
    is_known = all(share is not None and math.isfinite(share) for share in shares)
    carried = f"carr{'y' if len(culprits) > 1 else 'ies'} {percent(sum(shares))} of it" if is_known else ""
    if len(culprits) == 1:
        return f"{_name(first)} {carried or 'made it'}"
    return f"{len(culprits)} culprits {carried or 'made it'}, the largest {_name(first)}"


def _weight(culprit: dict[str, Any]) -> float:
    value = _float(culprit["share"])
    return abs(value) if value is not None and math.isfinite(value) else 0.0


def _name(culprit: dict[str, Any]) -> str:
    positions = culprit["positions"]
    sequence = _sequence(culprit)
    if len(positions) == 1:
        return f"the token {_quote(culprit)} at position {positions[0]} of the response {sequence}"
    return f"the {len(positions)} tokens from position {positions[0]} of the response {sequence}"


def _sequence(culprit: dict[str, Any]) -> str:
    if culprit["sequence_id"] is None:
        return f"in row {culprit['micro_batch_row']} of micro-batch {culprit['micro_batch']}, rank {culprit['rank']}"
    uid, _, index = culprit["sequence_id"].rpartition(":")
    return f"{uid if len(uid) <= 16 else uid[:8]}:{index}"  # verl's uids are 36 characters; 8 tell them apart


def _why(culprits: list[dict[str, Any]]) -> str:
    cause = max(culprits, key=_weight)["cause"]
    form = _CAUSES.get(cause["label"])
    if form is None:
        return "for no single reason: every factor is within three times what is typical"
    numbers = {name: _float(value) for name, value in cause["numbers"].items()}
    known = {name: _number(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}
    return "because " + form.format_map(_Unknown(known))


class _Unknown(dict):
    def __missing__(self, key: str) -> str:
        return "many"


# ---- the second sentence


def _without(event: dict[str, Any]) -> str:
    certificate, count = event["certificate"], len(event["culprits"])
    if not count:
        return f"The search stopped because {event['search']['stop_reason']}."
    them = "that token" if count == 1 and len(event["culprits"][0]["positions"]) == 1 else "them"
    after, bound = _float(certificate["norm_after"]), _float(certificate["error_bound"])
    threshold = _float(certificate["threshold"])
    if after is None or not math.isfinite(after):
        return f"What the step would have been without {them} is not known: {certificate['reason']}."
    margin = f" (within {_number(bound)})" if bound is not None and math.isfinite(bound) else ""
    start = f"Without {them} the norm is {_number(after)}{margin}"
    limit = f" of {_number(threshold)}" if threshold is not None else ""
    if certificate["verdict"] == "explained":
        return f"{start}, under the threshold{limit}: the spike is explained."
    if certificate["verdict"] == "not_explained":
        return f"{start}, still over the threshold{limit}: something else spikes, too."
    return f"{start}, and whether that explains the spike is undecided: {certificate['reason']}."


# ---- numbers and tokens


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _number(value: float | None) -> str:
    return number(value, 3)


def _quote(culprit: dict[str, Any]) -> str:
    # evidence.text=off keeps no text
    text = "".join(culprit["tokens"] or []) or " ".join(f"<{token}>" for token in culprit["token_ids"] or ["?"])
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:40])
    return f'"{shown}"'
