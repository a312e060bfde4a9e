# SPDX-License-Identifier: Apache-2.0
"""Runs with gradient analyses, written as the trainer writes them."""

import json
from pathlib import Path

DEVIATIONS = {"bucket_1": [0.0, 0.1], "bucket_2": [0.3, 0.4, 0.5], "bucket_10": [0.9]}


def metrics(scale: float = 1.0, terms=("task", "entropy", "kl")) -> dict[str, float]:
    """The metrics of one analysis; bucket ten checks that order is by number."""
    row: dict[str, float] = {"actor/grad_norm": 1.0}
    for number, bucket in enumerate([*DEVIATIONS, "all"], start=1):
        at, everyone = f"grad_norm/{bucket}", [d for ds in DEVIATIONS.values() for d in ds]
        deviations = DEVIATIONS.get(bucket, everyone)
        row |= {
            f"{at}/sample_count": 4.0 * len(deviations),
            f"{at}/sample_pct": len(deviations) / 6,
            f"{at}/reward_std_mean": sum(deviations) / len(deviations),
            f"{at}/reward_std_min": min(deviations),
            f"{at}/reward_std_max": max(deviations),
            f"{at}/group_rv_count": float(len(deviations)),
        }
        for place, term in enumerate(terms, start=1):
            norm = scale * number / place
            row[f"{at}/{term}"] = norm
            row[f"{at}/per_sample/{term}"] = norm / 10
            row[f"{at}/per_token/{term}"] = norm / 100
            row[f"{at}/loss/{'policy' if term == 'task' else term}"] = norm - 2
        row[f"{at}/loss/total"] = scale
    row["grad_cosine/task/bucket_1/bucket_2"] = -0.25
    return row


def write_record(run: Path, step: int, **options) -> Path:
    """What the trainer writes into ``bisect_dump_dir``."""
    folder = run / "gradloc" / "gradient_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    groups = [{"bucket": b, "reward_std": d} for b, ds in DEVIATIONS.items() for d in ds]
    record = {"global_step": step, "metrics": metrics(**options), "groups": groups}
    path = folder / f"step_{step}.json"
    path.write_text(json.dumps(record))
    return path


def write_table(run: Path, step: int) -> Path:
    """The trainer's CSV beside the record."""
    folder = run / "gradloc" / "gradient_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"group_rv_table_step_{step}.csv"
    rows = [f"{bucket},0,{deviation}" for bucket, deviations in DEVIATIONS.items() for deviation in deviations]
    path.write_text("\n".join(["bucket,group_id,reward_std", *rows]) + "\n")
    return path
