# SPDX-License-Identifier: Apache-2.0
"""Logs of one run as people have it at hand, and of every kind of explosion; tests/data/golden/logs.json says what is
told of each. The run has 120 steps and a spike at step 73.
"""

import json
import math
from io import StringIO

from pandas import DataFrame
from rich.console import Console
from rich.table import Table

NORMS = {step: 903.0 if step == 73 else round(0.4873 + 0.0137 * math.sin(step), 4) for step in range(1, 121)}
ROWS = [{"step": step, "grad_norm": norm, "reward": 0.5} for step, norm in NORMS.items()]
CONSOLE = [f"step:{step} - actor/grad_norm:{norm} - critic/score/mean:0.5" for step, norm in NORMS.items()]
TQDM = "(TaskRunner pid=7) Training Progress:  {at:.0f}%|███   | {step}/120 [01:10<00:45,  1.18it/s]"
BARS = "Step: {at:3.0f}%|███   | {step}/120 [01:10<00:45,  1.18it/s, loss=0.1, grad_norm={norm}]"


def ruled(rows, sides="|", line="-"):
    """Rows in frames; without ``line`` as Markdown does it."""
    names = list(rows[0])
    rule = f"+{line * 40}+"
    lines = [
        sides + sides.join(f" {cell:>10} " for cell in cells) + sides for cells in [names, *map(dict.values, rows)]
    ]
    under = sides + sides.join("---" for _ in names) + sides
    return "\n".join([rule, lines[0], rule, *lines[1:], rule] if line else [lines[0], under, *lines[1:]])


def each_ruled(side="|"):
    """A frame for each step, with a name and a value in each row."""
    told = ({"time/": "", "   step": row["step"], "train/": "", "   grad_norm": row["grad_norm"]} for row in ROWS)
    frames = (f"{side} {name:<15}{side} {value!s:>9} {side}" for row in told for name, value in row.items())
    return "\n".join("-" * 29 + "\n" + line if "time/" in line else line for line in frames)


def printed_by_rich(rows):
    """As rich prints a table."""
    table, out = Table(*rows[0]), StringIO()
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(file=out, width=80).print(table)
    return f"training is over\n{out.getvalue()}\nsaved\n"


def german(value):
    return str(value).replace(".", ",")


def shuffled():
    lines = [f"{step},{norm}" for step, norm in NORMS.items()]
    return "\n".join(["step,grad_norm", *lines[1::2], *lines[::4], *lines[2::4][::-1]])


LOSS = 0.25
LINES = {
    "nanogpt.log": "iter {s}: loss {l}, time 12.31ms, grad_norm {n}, mfu 31.02%",
    "torchtune.txt": "Step {s} | loss:{l} lr:1e-05 tokens_per_second_per_gpu:1234.5 grad_norm:{n} ",
    "titan.log": "[rank0]:[titan] 2025-11-02 10:00:00 - root - INFO - step: {s:2}  loss: {l:8.5f}  grad_norm: {n:8.4f}"
    "  memory: 10.23GiB(12.93%)  tps: 1,234  mfu: 10.23%",
    "megatron.log": " [2025-11-02 10:00:00] iteration {s:8}/     120 | consumed samples:          256 | elapsed time "
    "per iteration (ms): 1234.5 | lm loss: {l:.6E} | loss scale: 1.0 | grad norm: {n:.3f} | number of skipped "
    "iterations: 0 |",
    "deepspeed.log": "[2025-11-02 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=0, "
    "lr=[1e-05], mom=[(0.9, 0.95)], grad_norm={n}, loss={l}",
    "fairseq.log": '2025-11-02 10:00:00 | INFO | train_inner | {{"epoch": 1, "loss": "{l}", "num_updates": "{s}", '
    '"gnorm": "{n}"}}',
    "fairseq-plain.log": "2025-11-02 10:00:00 | INFO | train_inner | epoch 001:     {s} / 120 loss={l}, ppl=2.1, "
    "num_updates={s}, lr=1e-05, gnorm={n}, clip=0",
    "ray-dict.log": "(ActorModelRayActor pid=77) {{'policy_loss': {l}, 'grad_norm': {n}, 'global_step': {s}}}",
    "slime.log": "(MegatronTrainRayActor pid=7) [2025-11-02 10:00:00] model.py:497 - step {s}: {{'train/loss': {l}, "
    "'train/grad_norm': {n}, 'train/lr-pg_0': 1e-06}}",
    "logfmt.log": 'time="2025-11-02T10:00:00Z" level=info msg="train" step={s} loss={l} grad_norm={n}',
    "loguru.log": "2025-11-02 10:00:00.123 | INFO     | trainer.loop:train:101 - step {s} loss {l} grad_norm {n}",
    "logging.log": "INFO:root:step {s}: loss={l} grad_norm={n}",
    "absl.log": "I1102 10:00:00.000000 140123 trainer.py:101] step={s} grad_norm={n} loss={l}",
    "rich-handler.log": "[10:00:00] INFO     step {s} loss {l} grad_norm {n}                 trainer.py:101",
    "prime.log": "10:00:00 SUCCESS Step {s} | Time: 1.23s | Loss: {l:.4f} | Grad. Norm: {n:.4f} | LR: 1.00e-06",
    "t5x.log": "I1102 10:00:00.1 train.py:1] {{'train/grad_norm': {n}, 'train/loss': {l}, 'step': {s}}}",
    "swift.txt": "Train:  10%|███ | {s}/120 [00:10<00:10, 1.0it/s]{{'loss': {l}, 'grad_norm': {n}, "
    "'global_step/max_steps': '{s}/120'}}",
    "texts.log": "{{'loss': '{l}', 'grad_norm': '{n}', 'learning_rate': '1e-05', 'epoch': '0.5'}}",
    "kubectl.log": "[pod/train-0-abcde/trainer] step:{s} - actor/grad_norm:{n} - critic/score/mean:0.5",
    "stern.log": "train-0-abcde trainer step:{s} - actor/grad_norm:{n} - critic/score/mean:0.5",
    "actions.log": "2025-11-02T10:00:00.1234567Z step:{s} - actor/grad_norm:{n} - critic/score/mean:0.5",
    "trainer_log.jsonl": '{{"current_steps": {s}, "total_steps": 120, "loss": {l}, "grad_norm": {n}, "percent": 1.0}}',
    "logging.jsonl": '{{"loss": {l}, "grad_norm": {n}, "global_step/max_steps": "{s}/120", "elapsed_time": "10s"}}',
    "structlog.json": '{{"event": "train", "timestamp": "2025-11-02T10:00:00Z", "step": {s}, "grad_norm": {n}}}',
    "nested.jsonl": '{{"step": {s}, "train": {{"grad_norm": {n}, "loss": {l}}}}}',
}
"""What trainers and loggers print of each step."""
HEADED = {
    "metrics.csv": ("epoch,grad_norm,step,train_loss", "0,{n},{s},\n0,,{s},{l}"),
    "comment.csv": ("# run 7, made by x\n# lr 1e-5\nstep,grad_norm", "{s},{n}"),
    "pipe.csv": ("step|grad_norm|loss", "{s}|{n}|{l}"),
    "spaces.csv": ("step, grad_norm, loss", "{s}, {n}, {l}"),
    "scientific.csv": ("step,grad_norm", "{s:.6e},{n:.6e}"),
    "grafana.csv": ('"Time","grad_norm"', '"2025-11-02 10:00:{s:03}","{n}"'),
    "mlflow.csv": ("run_id,key,value,step,timestamp", "a1,grad_norm,{n},{s},17\na1,loss,{l},{s},17"),
    "grad_norm.csv": ("step,timestamp,value", "{s},17{s},{n}"),
    "org.txt": ("| step | grad_norm | loss |\n|------+-----------+------|", "| {s} | {n} | {l} |"),
    "simple.txt": ("  step    grad_norm    loss\n------  -----------  ------", "{s:6}  {n:11}  {l:6}"),
    "rst.txt": ("=====  ==========\n step   grad_norm\n=====  ==========", "{s:5}  {n:10}"),
}
"""A head, and what stands below it for each step."""
FRAME = DataFrame(ROWS)
VALUES = [{"metricName": "grad_norm", "metricValue": str(n), "step": s, "timestamp": 1} for s, n in NORMS.items()]
DOCUMENTS = {
    "index.json": FRAME.set_index("step")[["grad_norm"]].to_dict("index"),
    "columns.json": FRAME.to_dict(),
    "split.json": FRAME.to_dict("split"),
    "lists.json": FRAME.to_dict("list"),
    "comet.json": VALUES,
    "tensorboard.json": [[1.7e9 + step, step, norm] for step, norm in NORMS.items()],
}
"""Documents: of pandas' to_json, Comet, TensorBoard."""


FILES = {
    **{name: "\n".join(form.format(s=s, n=n, l=LOSS) for s, n in NORMS.items()) for name, form in LINES.items()},
    **{
        name: "\n".join([head, *(form.format(s=s, n=n, l=LOSS) for s, n in NORMS.items())])
        for name, (head, form) in HEADED.items()
    },
    **{name: json.dumps(document) for name, document in DOCUMENTS.items()},
    "docker.json": "\n".join(json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "x"}) for line in CONSOLE),
    "journald.json": "\n".join(json.dumps({"MESSAGE": line, "_PID": "7"}) for line in CONSOLE),
    "bytes.json": "\n".join(json.dumps({"MESSAGE": list(line.encode()), "_PID": "7"}) for line in CONSOLE),
    "gcp.json": json.dumps(
        [{"textPayload": line, "timestamp": f"{at:05}"} for at, line in reversed(list(enumerate(CONSOLE)))]
    ),
    "pretty.json": json.dumps([{"jsonPayload": {"message": line}} for line in CONSOLE], indent=2),
    "aws.json": json.dumps({"events": [{"timestamp": at, "message": line} for at, line in enumerate(CONSOLE)]}),
    "loki.json": json.dumps({"data": {"result": [{"values": [[str(at), line] for at, line in enumerate(CONSOLE)]}]}}),
    "frame.txt": FRAME.to_string(),
    "named.txt": FRAME.set_index("step").to_string(),
    "r.csv": "step,grad_norm\n" + "\n".join(f'"{at}",{at},{norm}' for at, norm in NORMS.items()),
    "german.csv": "step,grad_norm,reward\n" + "\n".join(f'{s},"{german(n)}","0,5"' for s, n in NORMS.items()),
    "tabs.tsv": "step\tgrad_norm\n" + "\n".join(f"{step}\t{norm:,}" for step, norm in NORMS.items()),
    "history.txt": repr(ROWS) + "\n",
    "named-history.txt": f"log_history = {ROWS!r}\n",
    "pretty-history.txt": "[" + ",\n ".join(json.dumps(row, indent=1).replace('"', "'") for row in ROWS) + "]\n",
    "ruled.txt": ruled(ROWS),
    "unicode.txt": ruled(ROWS, "│", "─"),
    "markdown.md": ruled(ROWS, line=""),
    "frames.log": each_ruled(),
    "frames-unicode.log": each_ruled("│"),
    "rich.log": printed_by_rich(ROWS),
    "ray-tqdm.log": "\n".join(TQDM.format(at=s / 1.2, step=s) + line for s, line in enumerate(CONSOLE, 1)),
    "bars.log": "\r".join(
        BARS.format(at=s / 1.2, step=s, norm=shown) for s, n in NORMS.items() for shown in (NORMS.get(s - 1, 0.4), n)
    ),
    "slashes.log": "\n".join(f"[{step}/120] loss=0.1 | grad_norm={norm}" for step, norm in NORMS.items()),
    "batches.log": "\n".join(f"Epoch {s // 50} Batch {s % 50}: gnorm={norm} loss=0.1" for s, norm in NORMS.items()),
}
"""One run, in the formats that people have it in."""

CUT_BY_COMMAS = "\n".join(f"{s},{german(n)}" for s, n in NORMS.items())
STRANGE = [f"step {s // 10} begins" if s % 10 else f"step 1 grad_norm: {n} " * 40 for s, n in NORMS.items()]
REFUSED = {
    "shifted.csv": ("step,grad_norm\n" + "\n".join(f"{s},{n},1,2" for s, n in NORMS.items()), "2 columns in its head"),
    "cut-by-commas.csv": (f"step,grad_norm\n{CUT_BY_COMMAS}", "in its rows"),
    "cut-norms.csv": ("grad_norm\n" + "\n".join(german(n) for n in NORMS.values()), "in its rows"),
    "batches.log": ("\n".join(reversed(FILES["batches.log"].splitlines())), "batches go back"),
    "swapped.csv": ("grad_norm,step\n" + "\n".join(f"{s},{n}" for s, n in NORMS.items()), "no whole numbers"),
    "mixed.csv": ('step,grad_norm,loss\n1,"0,49",0.1\n2,"0,48",0.2\n', "one decimal sign"),
    "mixed-values.csv": (
        "step,value\n" + "\n".join(f"{s},{n}\n{s},2.0" for s, n in NORMS.items()),
        "several values for",
    ),
    "strange.log": ("\n".join(STRANGE), "--pattern"),
}
"""What would be misread, and a part of why it is refused."""


def console(norms, reward=None, **others) -> str:
    """A console log of these norms, from step 1 on, with other metrics as lists."""
    if reward:
        others["critic/score/mean"] = reward
    columns = [f" - {name}:{{{at}}}" for at, name in enumerate(others)]
    rows = zip(*others.values(), strict=True) if others else [()] * len(norms)
    lines = [f"step:{step} - actor/grad_norm:{norm}" for step, norm in enumerate(norms, 1)]
    return "\n".join(line + "".join(columns).format(*row) for line, row in zip(lines, rows, strict=True))


QUIET = [1.0, 1.1, 0.9, 1.05, 0.95] * 6
EXACT = [0.4873 + 0.0137 * math.sin(at) for at in range(60)]
SPIKE = [*QUIET, 300.0, *QUIET]
NAN = float("nan")
HELD = [0.6, 0.62] * 30 + [0.6]
CUT = "{'actor_rollout_ref': {'rollout': {'top_p': 0.9}}}\n"
LENGTHS = {"response_length/mean": [4096] * 60, "response_length/clip_ratio": [0.0] * 40 + [0.9] * 20}
HISTORY = [{"step": s, "grad_norm": 500.0 if s == 50 else 0.5, "loss": 0.1, "epoch": 0.1} for s in range(1, 51)]

EXPLOSIONS = {
    "quiet": console([*QUIET, 1.6]),
    "quiet, rounded": console([round(norm, 2) for norm in EXACT]),
    "quiet, of two values": console([0.9 + 0.09 * (at % 2) for at in range(60)]),
    "a warm-up that rises": console([0.05 * (at + 1) for at in range(15)] + [0.75] * 60),
    "one that grows": console([*QUIET, 20.0, 200.0, 50.0, *QUIET]),
    "no number to the end": console([*QUIET, 50.0, *QUIET, *[NAN] * 5]),
    "no number, then well": console([*EXACT, NAN, *EXACT]),
    "the reward fell": console(SPIKE, [0.6] * 31 + [0.5, 0.3, 0.05] + [0.02] * 27),
    "the reward fell and came back": console(SPIKE, [0.6] * 31 + [0.3, 0.1] + [0.6] * 28),
    "the reward held": console(SPIKE, HELD),
    "growth, slow": console([0.4 * 2 ** (at / 14) for at in range(121)]),
    "growth, late": console([*EXACT, *(0.5 * 2 ** (at / 5) for at in range(40))]),
    "a new level": console([*EXACT, 300.0, *([9.5] * 40)]),
    "a new level from step 5": console([0.5, 0.51, 0.49, 0.5, 903.0, *[9.54] * 55]),
    "clipped once": console([*EXACT, 1.0, *EXACT]),
    "clipped often": console([1.0 if at % 4 == 3 else round(0.3 + 0.2 * math.sin(7 * at), 2) for at in range(60)]),
    "zero": console([*EXACT, *[0.0] * 20]),
    "the last step": console([*EXACT, 300.0]),
    "in the warm-up": console([*QUIET[:11], 903.0, *QUIET]),
    "a short log": console([0.5, 0.5, 0.5, 0.5, 903, 0.5, 0.5]),
    "a critic's start": console([950.0, 820.0, 176.0, 117.0, 85.0, *[60.0] * 30]),
    "a cut of the sampling": CUT + console([0.5] * 60),
    "lengths at their limit": console([0.5] * 60, **LENGTHS),
    "another trainer's": "\n".join(f"step {row['step']} loss: 0.1 grad_norm: {row['grad_norm']}" for row in HISTORY),
    "lines that say no step": "\n".join([*CONSOLE, "actor/grad_norm: 5.0"]),
    "out of order.csv": shuffled(),
    "a row that is none.csv": "step,grad_norm\n" + "\n".join(f"{s},{n}" for s, n in NORMS.items()) + "\nx,1\n",
    "trainer_state.json": json.dumps({"log_history": HISTORY}),
}
"""Logs by what they show."""
