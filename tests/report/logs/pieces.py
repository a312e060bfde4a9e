# SPDX-License-Identifier: Apache-2.0
"""Pieces of logs as people paste them, ten lines or so, with what is right of each: the steps, the norm, the kind.

The lines are ours, in the shape that each trainer or logger prints.
"""

import json

NAN = float("nan")


def norms(num=60, at=47, spike=903.0):
    """Of each step from 1 on: about a half, and the spike."""
    return [(step, spike if step == at else 0.45 + (step * 7 % 11) / 100) for step in range(1, num + 1)]


def bar(step, total=900):
    return f"  5%|▌         | {step}/{total} [01:10<14:16, 1.18s/it]"


def lines(form, values, **others):
    return "\n".join(form.format(s=step, n=norm, **others) for step, norm in values)


MEGATRON = (
    " iteration {s:8}/  200000 | consumed samples: 4096 | elapsed time per iteration (ms): 4247.9 | learning rate: "
    "2.999E-04 | loss scale: 1.0 | grad norm: {n} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TRAINER = "{{'loss': {l}, 'grad_norm': {n}, 'learning_rate': 3e-06, 'epoch': {e}}}"
MMENGINE = "2025/05/07 11:45:16 - mmengine - INFO - Iter(train) [ {s}/2046]  lr: 1.7e-04  loss: 0.69  grad_norm: {n}"
OVERFLOW = (
    "[2025-06-07 22:16:00,018] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: {0}, reducing to {1}"
)
SLIME = (
    "(TrainRayActor pid=1) [2025-04-09 10:00:00] model.py:500 - step {s}: {{'train/loss': 0.12, 'train/entropy_loss': "
    "0.4, 'train/train_rollout_logprob_abs_diff': {d}, 'train/grad_norm': {n}, 'train/step': {s}}}"
)
NANOGPT = "iter {s}: loss {n:.4f}, time 1099.34ms, mfu 15.34%"
OLMO = (
    "2025-08-06 09:59:26 h:0 olmo.train:908 INFO [step={s}/7000,epoch=0]\n    optim/total_grad_norm={n}\n"
    "    train/CrossEntropyLoss={l}"
)
MINFM = (
    "Training:  78%|███▊  | {s}/2000 [6:15:28<1:55:17, 15.58s/step]2025-08-23 06:19:20 - t - WARNING - Step {s}: spiky "
    "gradient (norm={n}); skipping optimizer step."
)
LMOPS = (
    "train | data_epochs  0/10 | inner iter:   {i}/  8 | ppo epoch:  2/ 4 | global iter:     {s}/  5000| tot_loss: 2.3 "
    "| reward: 0.1 | scale: 128.00"
)
INTERN = (
    "2025-11-24 02:35:28 INFO pipeline.py:770 in record -- tflops=229.6 step={s} loss=2.17 grad_norm="
    "{{'0_default': {n}, '1_fp32': 0.0}} micro_num=16"
)
CLEARML = [
    {"iter": step, "metric": "train", "variant": name, "value": value, "timestamp": 1}
    for step, norm in norms()
    for name, value in (("grad_norm", norm), ("loss", 2.0), ("reward", 0.6))
]
RAY = (
    "\x1b[36m(TaskRunner pid=7)\x1b[0m Training Progress:  {s}%|███   | {s}/60 [00:10<00:05, 18.0it/s]step:{s} - "
    "actor/grad_norm:{n} - critic/score/mean:0.5"
)

SPIKE = {"kind": "back", "steps": (1, 60), "peak": (47, 903.0)}
"""What is right of the run of :func:`norms` whose loss or reward is the same throughout, or not known."""

PIECES = {
    "megatron, NaN before it begins": (
        lines(MEGATRON, [(s, "nan") for s in range(5426, 5430)]),
        {"kind": "lost", "steps": (5426, 5429), "unsaid": "anew", "advice": "before step 5426"},
    ),
    "a trainer's dicts below bars": (
        "\n".join(
            [
                TRAINER.format(l=14.7, n=86.9, e=0.01),
                TRAINER.format(l=14.4, n=90.6, e=0.01),
                *map(bar, range(60, 71)),
                TRAINER.format(l=8195.8, n="nan", e=0.01),
            ]
        ),
        {"kind": "end", "steps": (50, 70), "peak": (70, NAN), "says": "8,196", "advice": "before step 61"},
    ),
    "skips for ever": (
        lines(MINFM, [(s, 2.15 + s / 1e5) for s in range(1557, 1561)]),
        {"kind": "skipped", "steps": (1557, 1560), "says": "4 times"},
    ),
    "norm and no level to train at": (
        "\n".join(SLIME.format(s=s, n=2.9e9 + s, d=0.03) for s in (1, 28)),
        {"kind": "height", "steps": (1, 28), "health": "Too short to judge: 2 steps"},
    ),
    "loss and gradient vanish": (
        "\n".join(
            OLMO.format(s=s, n=n, l=value)
            for s, n, value in ((1, 231.7, 12.18), (2, 2e-4, 1.787e-06), (3, 7.7e-08, 0.0))
        ),
        {"kind": "vanish", "steps": (1, 3), "advice": "labels"},
    ),
    "fairseq of old": (
        "\n".join(
            f"| epoch 001  {s} / 331737 loss={loss} (9.1), wps=18515, bsz=861, lr=1.25, clip=100%, gnorm={n}"
            for s, loss, n in (
                (1000, 9.57, 2.05),
                (2000, 8.61, 1.71),
                (3000, 7.5, 2.75),
                (4000, 6.87, 100615.9),
                (5000, 10405.01, 1.5e12),
                (6000, 4.7e9, "inf"),
            )
        ),
        {"steps": (1000, 6000), "first": 4000, "advice": "before step 3001"},
    ),
    "NaN norms and a sound loss": (
        lines(MMENGINE, [(s, "nan") for s in range(510, 590, 10)]),
        {"kind": "lost", "steps": (510, 580), "advice": "No need to go back", "unsaid": "anew", "worst": "warning"},
    ),
    "NaN from the first row on": (
        "\n".join(TRAINER.format(l=value, n="nan", e=e) for value, e in ((344093.2, 0.0), (0.0, 0.0), (0.0, 0.01))),
        {"kind": "lost", "advice": "a restart with the same settings will repeat it", "worst": "danger"},
    ),
    "a loss alone, and an evaluation": (
        lines(NANOGPT, [(s, 4 + s / 1e5) for s in range(2920, 3000, 10)])
        + "\nstep 3000: train loss 4.0390, val loss 4.0427\nsaving checkpoint to out\n"
        + lines(NANOGPT, [(3000, 4.249), *((s, NAN) for s in range(3010, 3061, 10))]),
        {
            "kind": "unfinite",
            "steps": (2920, 3060),
            "segments": 1,
            "says": "from step 3010",
            "advice": "before step 3001",
        },
    ),
    "fp16 runs out of its scale": (
        "\n".join(f"{bar(377 + at)}{OVERFLOW.format(2 ** (7 - at), 2 ** (6 - at))}" for at in range(1, 7))
        + "\nException: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        {"kind": "skipped", "says": "6 times"},
    ),
    "a lone NaN under fp16": (
        "\n".join(TRAINER.format(l=0.15, n="nan" if at == 4 else 0.5, e=at / 25) for at in range(1, 12)),
        {"kind": "back", "peak": (4, NAN), "advice": "No need to go back"},
    ),
    "a gradient of zero": (
        TRAINER.format(l=0.3537, n=0.0, e=0.05),
        {"kind": "zero", "says": "the loss is not (0.354"},
    ),
    "a KL that is not finite": (
        "Step | Training Loss | reward | kl\n-- | -- | -- | --\n"
        + lines("{s} | -0.28 | 13.4 | {n}", [(s, "nan") for s in (1, 2, 3, 4)]),
        {"kind": "unfinite", "steps": (1, 4), "says": "kl is NaN from step 1"},
    ),
    "a norm in braces": (
        lines(INTERN, [(642, 2.1566), (643, 1.759)]),
        {"kind": "", "steps": (642, 643), "largest": 2.1566},
    ),
    "three steps": (
        lines(MEGATRON, [(29, 0.85), (30, 1.37), (31, 1.08)]),
        {"kind": "", "says": "Too short to judge: 3 steps"},
    ),
    "global iter": (
        "\n".join(
            [LMOPS.format(i=7, s=13), LMOPS.format(i=1, s=14), OVERFLOW.format(128, 64), LMOPS.format(i=3, s=15)]
        ),
        {"kind": "skipped", "steps": (13, 15), "segments": 1, "says": "after step 14"},
    ),
    "log-probs that differ": (
        "\n".join(SLIME.format(s=s, n=0.5, d=0.2 + s % 3 / 10) for s in range(30)),
        {"kind": "clipped", "steps": (0, 29), "worst": "warning", "rule": "mismatch_log_probs"},
    ),
    "clearml's offline session": (json.dumps(CLEARML), SPIKE),
    "clearml's, a list a line": (
        "\n".join(json.dumps(CLEARML[at : at + 9]) for at in range(0, len(CLEARML), 9)),
        SPIKE,
    ),
    "clearml's scalars": (
        json.dumps(
            {"train": {"grad_norm": {"name": "grad_norm", "x": [s for s, _ in norms()], "y": [n for _, n in norms()]}}}
        ),
        SPIKE,
    ),
    "llm.c": (
        lines("step {s:4}/60 | train loss 1.98 | norm {n:.4f} | lr 3.00e-04 | (123.40 ms | 4242 tok/s)", norms()),
        SPIKE,
    ),
    "a bar, Ray's prefix and a colour": (lines(RAY, norms()), SPIKE),
    "lightning's norms": (
        "epoch,grad_2.0_norm/h.0.weight,grad_2.0_norm_total,step,train_loss\n" + lines("0,0.1,{n},{s},2.0", norms()),
        SPIKE,
    ),
    "neptune's exporter": (
        "project_id,run_id,attribute_path,attribute_type,step,timestamp,float_value\n"
        + lines("p,R-1,train/grad_norm,float_series,{s},17,{n}\np,R-1,train/loss,float_series,{s},17,2.0", norms()),
        SPIKE,
    ),
    "columns of one's own": ("step,what,number\n" + lines("{s},grad_norm,{n}\n{s},loss,2.0", norms()), SPIKE),
    "one step in ten, and a collapse between": (
        "\n".join(
            f"step:{10 * at} - actor/grad_norm:{0.5 + at % 3 / 50} - critic/score/mean:{0.6 if at < 21 else 0.02}"
            for at in range(1, 41)
        ),
        {"kind": "fell", "steps": (10, 400), "says": "between steps 200 and 210", "advice": "before step 201"},
    ),
    "a loss that a spike has spoiled": (
        "\n".join(f"step {s} | loss: {1.57 if s <= 47 else 2.73} | grad_norm: {n}" for s, n in norms()),
        {"kind": "collapse", "peak": (47, 903.0), "says": "Loss rose from 1.6 to 2.7"},
    ),
    "a loss that rises bit by bit": (
        "\n".join(
            f"step {s} | loss: {3 - s / 50 if s < 60 else 1.8 + (s - 60) / 20:.3f} | grad_norm: 0.5"
            for s in range(1, 161)
        ),
        {"kind": "fell", "advice": "before step", "says": "loss rose bit by bit"},
    ),
    "epochs of a known length": (
        "\n".join(
            f"Epoch [{1 + (s - 1) // 20}][{1 + (s - 1) % 20}/20]  lr: 0.01  loss: 2.0  grad_norm: {n}"
            for s, n in norms()
        ),
        SPIKE,
    ),
}
"""By what they are: the text, and what is right of it."""
