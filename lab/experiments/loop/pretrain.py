# SPDX-License-Identifier: Apache-2.0
"""Continue pretraining SmolLM2 on text with one damaged document in forty: `./run_experiment.sh pretrain`.

The text is Python's own documentation, damaged as documents of real corpora are. Every peak of the norm is searched:
does it come from a damaged document, and is that document named? The results go to `pretrain.json`, `summary.md` and
`pretrain.png` in the run's folder; docs/pretraining.md describes one such run.
"""

import base64
import os
import platform
import pydoc_data.topics
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gradloc
from lab.experiments import summaries
from lab.experiments.settings import PretrainSettings
from lab.experiments.step_log import begin, log_step
from lab.experiments.verdict import read_events
from lab.output import figure, table, write_json

WINDOW = 32
"""Number of steps whose median is the usual norm; small, since the norm falls while the model learns."""
CHARACTERS = 400
"""Length of a document, longer than its tokens in a step."""
KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "mojibake": lambda text, _: text.encode().decode("utf-16-le", "replace"),
    "base64": lambda text, _: base64.b64encode(text.encode()).decode(),
    "repeated line": lambda text, _: (text[:40] + "\n") * 20,
    "another script": lambda text, _: text.lower().translate({97 + i: 0x430 + i for i in range(26)}),
    "logs": lambda _, source: "\n".join(
        f"2024-03-{source.randint(1, 28):02d}T{source.random():.6f} {source.choice(['WARN', 'INFO'])} "
        f"[{source.getrandbits(32):08x}] 0x{source.getrandbits(48):012x} ({source.randrange(999)} ms)"
        for _ in range(9)
    ),
}
"""Functions that damage a document: UTF-8 read as UTF-16, encoded, a repeated line, other letters, lines of a
program's log."""


def documents() -> list[str]:
    """Return Python's documentation in pieces of one length, in a fixed order."""
    texts = (" ".join(text.split()) for _, text in sorted(pydoc_data.topics.topics.items()))
    return [text[at : at + CHARACTERS] for text in texts for at in range(0, len(text) - CHARACTERS + 1, CHARACTERS)]


def damaged(settings: PretrainSettings) -> dict[str, str]:
    """Return document name, `STEP-ROW` -> kind of damage; all kinds are equally frequent."""
    source, kinds = random.Random(f"pretrain damage {settings.seed}"), list(KINDS)
    first = settings.clean * settings.rows
    places = (start + source.randrange(settings.every) for start in range(first, 10**5, settings.every))
    names = (f"{place // settings.rows + 1}-{place % settings.rows}" for place in places)
    found = {name: kinds[number % len(kinds)] for number, name in enumerate(names)}
    return {name: kind for name, kind in found.items() if step_of(name) <= settings.steps}


def step_of(name: str) -> int:
    return int(name.partition("-")[0])


def main(overrides: list[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # imported here, since the tables do not need it

    settings, run_dir = PretrainSettings.parse(overrides), Path(os.environ["GRADLOC_RUN_DIR"])
    torch.set_num_threads(settings.threads)
    path, source = Path(os.environ["GRADLOC_DEMO_MATERIAL"]) / "model", random.Random(f"pretrain {settings.seed}")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, fused=True)
    trigger = {"floor": settings.peak, "cap": settings.peak, "window": WINDOW}
    watch = gradloc.Watch(model, optimizer, run_dir, "observe", tokenizer, trigger=trigger, metrics=False)
    texts, kinds, norms = source.sample(documents(), settings.documents), damaged(settings), []
    begin(settings.steps)
    for step in range(1, settings.steps + 1):
        began, names = time.monotonic(), [f"{step}-{row}" for row in range(settings.rows)]
        ids = torch.full((settings.rows, settings.tokens + 1), tokenizer.pad_token_id)
        mask = torch.zeros(settings.rows, settings.tokens)
        for row, name in enumerate(names):
            place = ((step - 1) * settings.rows + row) % len(texts)
            if place == 0:
                source.shuffle(texts)
            text = texts[place]
            text = KINDS[kinds[name]](text, source) if name in kinds else text
            own = tokenizer(text)["input_ids"][: settings.tokens + 1]
            ids[row, : len(own)], mask[row, : len(own) - 1] = torch.tensor(own), 1
        optimizer.zero_grad()
        loss = 0.0
        for part in torch.arange(settings.rows).split(2):  # micro-batches
            x, kept = ids[part], mask[part]
            log_probs = gradloc.token_log_probs(model(x[:, :-1]).logits, x[:, 1:])
            watch.note(mask=kept, ids=x[:, 1:], rows=[names[row] for row in part])
            share = -(log_probs * kept).sum() / mask.sum()
            share.backward()
            loss += share.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        data = {"loss": loss, "actor/grad_norm": norms[-1], "timing_s/step": time.monotonic() - began}
        log_step(step, data | watch.metrics, run_dir)
    result = record(settings, norms, kinds, read_events(run_dir))
    write_json(run_dir / "pretrain.json", result)
    tables = [by_kind(result), peaks(result)]
    (run_dir / "summary.md").write_text("\n\n".join(map(table, tables)) + "\n", encoding="utf-8")
    draw(result, run_dir / "pretrain.png")


# ---- what was found


def record(settings: PretrainSettings, norms: list[float], kinds: dict[str, str], events: list[dict]) -> dict[str, Any]:
    """Return the record of the tables."""
    return {
        "command": "./run_experiment.sh pretrain",
        "python": platform.python_version(),
        "settings": asdict(settings),
        "norms": norms,
        "damaged": kinds,
        "peaks": [
            {
                "step": event["step"]["global_step"],
                "threshold": event["trigger"]["threshold"],
                "named": {culprit["sequence_id"]: len(culprit["positions"]) for culprit in event["culprits"]},
                "cause": event["cause"]["label"],
                "norm_after": event["certificate"]["norm_after"],
                "verdict": event["certificate"]["verdict"],
            }
            for event in events
        ],
    }


def over_usual(result: dict[str, Any], step: int) -> float:
    """Return a step's norm divided by the median of the norms before it."""
    before = result["norms"][max(0, step - 1 - WINDOW) : step - 1] or result["norms"][:1]
    return result["norms"][step - 1] / statistics.median(before)


def by_kind(result: dict[str, Any]) -> summaries.Table:
    """Return a row for each kind of damage and one for all.

    Precision is the share of damaged documents among those named; recall is the share of named documents among the
    damaged ones in peaks."""
    kinds, named = result["damaged"], {peak["step"]: set(peak["named"]) for peak in result["peaks"]}
    head = ["damage", "documents", "norm over the usual: median", "most", "in a peak", "named", "clean ones named"]
    lines = []
    for kind in (*KINDS, "all"):
        own = [name for name in kinds if kind in (kinds[name], "all")]
        over = [over_usual(result, step_of(name)) for name in own]
        peaked = [name for name in own if step_of(name) in named]
        right = sum(name in named[step_of(name)] for name in peaked)
        wrong = len(set().union(*(named[step_of(name)] for name in peaked)) - set(kinds))
        precision = f"{right / (right + wrong):.0%}" if right + wrong else "-"
        recall = f"{right / len(peaked):.0%}" if peaked else "-"
        ratios = [f"{of(over):.2f}" if over else "-" for of in (statistics.median, max)]
        lines.append([kind, str(len(own)), *ratios, *map(str, (len(peaked), right, wrong)), precision, recall])
    return [[*head, "precision", "recall"], *lines]


def peaks(result: dict[str, Any]) -> summaries.Table:
    """Return a row for each peak."""
    lines = []
    for peak in result["peaks"]:
        step, kinds = peak["step"], result["damaged"]
        here = [f"{name} ({kind})" for name, kind in kinds.items() if step_of(name) == step]
        norms = f"{result['norms'][step - 1]:.3g} / {peak['threshold']:.3g}"
        tokens = ", ".join(f"{name}: {count}" for name, count in sorted(peak["named"].items())) or "nothing"
        after = [f"{peak['norm_after']:.3g}", peak["verdict"], peak["cause"]]
        lines.append([str(step), norms, ", ".join(here) or "-", tokens, *after])
    return [["step", "norm / threshold", "damaged", "named: tokens", "norm without", "certificate", "cause"], *lines]


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot every step's norm relative to the usual one, and mark the damaged documents' steps."""
    steps = range(WINDOW, len(result["norms"]) + 1)
    with figure(path, 11, 1) as (_, axes):
        axes.plot(steps, [over_usual(result, step) for step in steps], color="0.6", linewidth=1)
        for index, kind in enumerate(KINDS):
            own = [step_of(name) for name, known in result["damaged"].items() if known == kind]
            axes.plot(own, [over_usual(result, step) for step in own], "o", color=f"C{index}", label=kind)
        axes.axhline(result["settings"]["peak"], color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="step", title="gradient norm over the usual one; dots: a damaged document is in the step")
        axes.legend(frameon=False)


if __name__ == "__main__":
    main(sys.argv[1:])
