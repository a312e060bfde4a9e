# SPDX-License-Identifier: Apache-2.0
"""Run TRL's GRPOTrainer on two CPU processes with one bad advantage: `torchrun -m lab.experiments.trl.demo`.

What a user of TRL writes is the import of GRPOTrainer from gradloc.trl, and `gradloc=`; the rest is a plain script.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from gradloc.trl import GRPOTrainer
from lab.experiments.cpu.arithmetic import score
from lab.experiments.settings import TrlSettings, draw


class Faulty(GRPOTrainer):
    """Spoils the advantage of one token of what training is given, and writes down which."""

    def __init__(self, *args: Any, settings: TrlSettings, record: Path, **others: Any):
        super().__init__(*args, **others)
        self.settings, self.record = settings, record
        self.fault = draw(settings.seed, settings.first_step, settings.last_step)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self.state.global_step + 1 != self.fault.step:
            return inputs
        rows, window = len(inputs["prompt_ids"]), self.args.gradient_accumulation_steps
        first = (self.accelerator.process_index * window + self._step % window) * rows  # rank by rank
        num_rows = self.accelerator.num_processes * window * rows
        row = int(self.fault.sequence * num_rows)
        if not first <= row < first + rows:
            return inputs
        mask = inputs["completion_mask"]
        position = int(self.fault.position * int(mask[row - first].sum()))
        advantages = inputs["advantages"].unsqueeze(1).expand(mask.shape).clone()
        before, advantages[row - first, position] = float(advantages[row - first, position]), self.settings.advantage
        planted = {
            "seed": self.settings.seed,
            "plan": asdict(self.fault),
            "step": self.fault.step,
            "row": row,
            "num_rows": num_rows,
            "position": position,
            "token_id": int(inputs["completion_ids"][row - first, position]),
            "advantage_before": before,
            "advantage_planted": self.settings.advantage,
        }
        self.record.write_text(json.dumps(planted, indent=2) + "\n", encoding="utf-8")
        return {**inputs, "advantages": advantages}


class Lines(TrainerCallback):
    """Prints a line for each step, as verl's console logger does, and keeps its numbers in a file."""

    NAMES = {"grad_norm": "actor/grad_norm", "reward": "critic/score/mean"}

    def __init__(self, metrics: Path):
        self.metrics, self.started = metrics, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            print(f"Total training steps: {state.max_steps}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "grad_norm" not in logs:
            return
        now = time.monotonic()
        data = {self.NAMES.get(name, name): value for name, value in logs.items() if isinstance(value, float | int)}
        data["timing_s/step"], self.started = now - self.started, now
        said = " - ".join(f"{name}:{value}" for name, value in data.items())
        print(f"step:{state.global_step} - {said}", flush=True)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "data": data}) + "\n")


def right_answers(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The demo's reward, of each completion."""
    return [score(None, said[0]["content"], right) for said, right in zip(completions, answer, strict=True)]


def main(overrides: list[str]) -> None:
    settings = TrlSettings.parse(overrides)
    material, run_dir = Path(os.environ["GRADLOC_DEMO_MATERIAL"]), Path(os.environ["GRADLOC_RUN_DIR"])
    rows = str(material / "train.parquet")
    data = load_dataset("parquet", data_files=rows, split="train", cache_dir=str(run_dir / "data"))
    data = data.map(lambda row: {"answer": row["reward_model"]["ground_truth"]}).select_columns(["prompt", "answer"])
    # 2 processes x 8 micro-batches x 4 rows: 16 prompts with 4 responses each, as the other demos have
    args = GRPOConfig(
        output_dir=str(run_dir),
        run_name="demo-trl",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_generations=4,
        max_completion_length=24,
        max_steps=settings.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        seed=settings.seed,
        disable_tqdm=True,
    )
    gradloc = {"action": {"mode": settings.gradloc}, "trigger": {"tau": settings.tau}}
    trainer = Faulty(
        model=str(material / "model"),
        reward_funcs=right_answers,
        args=args,
        train_dataset=data,
        callbacks=[Lines(run_dir / "metrics.jsonl")],
        gradloc="off" if settings.gradloc == "off" else gradloc,
        settings=settings,
        record=run_dir / "planted.json",
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).parameters()
    if trainer.accelerator.is_main_process and not all(bool(weight.isfinite().all()) for weight in weights):
        raise SystemExit("The weights are not finite any more.")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # else threads of torch may abort the process: "terminate called without an active exception"
