# SPDX-License-Identifier: Apache-2.0
"""A made-up run of 300 steps with 30 events, as the trainer would have written it: for pictures and browser tests."""

import math
import random
from pathlib import Path

from gradloc import __version__
from tests.report.builder import make_culprit, make_event, make_metrics, make_sequence, write_run

TEXT = (
    " Let n be the number of tickets that Mia sold on Friday . Then she sold 2 n on Saturday , and 14 fewer on Sunday ,"
    " so 5 n - 14 = 186 and n = 40 . Wait , that counts Saturday twice . Check again : 40 + 80 + 66 = 186 , which is"
    " right . So she sold 80 tickets on Saturday , twice as many as on Friday , and the answer is \\boxed{ 80 } ."
)
PROMPT = "Mia sold tickets on three days, 186 in all ... How many did she sell on Saturday?"
MADE_BY = {
    "project": "math",
    "experiment": "made-up run",
    "trainer": "verl 0.9.1",
    "torch": "2.9.1",
    "gradloc": __version__,
    "model": "Qwen/Qwen3-4B",
    "commit": "1f0c3a9be812",
    "config": "8c2d61e0aa47",
}
CAUSES = {
    "extreme_advantage": ("advantage_over_typical", 2, 5),
    "token_mismatch": ("ratio_over_typical", 1, 3),
    "low_probability": ("jacobian_over_typical", 0.6, 1.5),
    "large_jacobian": ("jacobian_over_typical", 1, 2),
    "kl_term": ("kl_over_typical", 1, 2),
    "unknown": ("ratio_over_typical", 0, 0),
}


def write_long_run(folder: Path, num_steps: int = 300, num_events: int = 30) -> Path:
    """Write the run; the same one every time. Without events it is a healthy run."""
    source = random.Random(7)
    tokens = [f" {word}" for word in TEXT.split()]
    spikes = {
        step: 60 * math.exp(abs(source.gauss(0, 1.5))) for step in source.sample(range(20, num_steps), num_events)
    }
    events, sequences = [], {}
    for step in sorted(spikes):
        event = _event(source, step, spikes[step], tokens)
        events.append(event)
        sequences[event["event_id"]] = _sequences(event, tokens)
    return write_run(folder, events if num_events else None, sequences, _metrics(source, num_steps, spikes))


def _event(source: random.Random, step: int, norm: float, tokens: list[str]) -> dict:
    label = source.choice(list(CAUSES))
    name, low, high = CAUSES[label]
    count = source.choice([1, 1, 1, 2, 5])
    culprits = []
    for position in sorted(source.sample(range(4, len(tokens) - 4), count)):
        factor = 10 ** source.uniform(low, high)
        facts = {
            "extreme_advantage": {"advantage": 0.7 * factor},
            "token_mismatch": {
                **dict.fromkeys(("old_log_prob_used", "old_log_prob_stored"), -4.6 - math.log(factor)),
            },
            "low_probability": {"log_prob": -9.2},
        }.get(label, {})
        numbers = {name: factor, "log_prob_gradient_norm": source.uniform(3, 30)}
        culprits.append(
            make_culprit(
                position,
                tokens[position],
                share=0.98 / count,
                grad_norm=0.98 * norm / count,
                text_before="".join(tokens[max(position - 14, 0) : position]),
                text_after="".join(tokens[position + 1 : position + 8]),
                prompt=PROMPT,
                data_row=17,
                cause={"label": label, "numbers": numbers},
                **({"advantage": 1.1} | facts),
            )
        )
    verdict = source.choice(["explained"] * 6 + ["not_explained", "undecided"])
    after = 61.3 if verdict == "not_explained" else source.uniform(0.6, 1.6)
    scale = min(1.0, 1.0 / norm)
    given = {"grad_clip": 1.0, "clip_scale": scale, "culprit_share": 0.98, "healthy_norm": after * scale}
    return make_event(
        step,
        culprits,
        run=MADE_BY,
        time=f"2026-08-12T03:{step % 60:02}:07Z",
        trigger={"grad_norm": norm, "kind": "adaptive"},
        certificate={"norm_before": norm, "norm_after": after, "verdict": verdict, "reason": ""},
        consequence=given | {"last_checkpoint": f"checkpoints/math/global_step_{step // 50 * 50}"},
    )


def _sequences(event: dict, tokens: list[str]) -> list[dict]:
    places = {culprit["positions"][0]: culprit for culprit in event["culprits"]}
    num = len(tokens)
    share = [places[at]["share"] if at in places else 0.0004 * math.sin(at * 1.7) for at in range(num)]
    advantage = [places[at]["values"]["advantage"] if at in places else 0.5 for at in range(num)]
    coefficient = [-70.0 if at in places else -0.009 for at in range(num)]
    mine = make_sequence(tokens=tokens, prompt=PROMPT, share=share, advantage=advantage, coefficient=coefficient)
    half = {"tokens": tokens[: num // 2], "share": [0.0001] * (num // 2), "advantage": [-1.2] * (num // 2)}
    other = make_sequence(prompt=PROMPT, micro_batch_row=1, sequence_id=mine["sequence_id"][:-1] + "4", **half)
    return [mine, other]


def _metrics(source: random.Random, num_steps: int, spikes: dict[int, float]) -> list[dict]:
    rows = make_metrics(num_steps, ())
    for row in rows:
        step = row["step"]
        norm = spikes.get(step, math.exp(source.gauss(0, 0.2)))
        row["data"] |= {
            "actor/grad_norm": 0.4 * norm if step in spikes else 0.9 * norm,
            "actor/grad_norm_max": norm,
            "critic/score/mean": 0.3 + 0.4 * (1 - math.exp(-step / 80)) + source.gauss(0, 0.02),
            "actor/entropy": 1.1 * math.exp(-step / 300) + 0.2 + source.gauss(0, 0.01),
            "actor/kl_loss": 0.001 * math.sqrt(step) + abs(source.gauss(0, 0.0005)),
        }
    return rows
