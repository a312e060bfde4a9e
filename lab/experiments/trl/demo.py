# SPDX-License-Identifier: Apache-2.0
"""Run TRL's GRPOTrainer on two CPU processes with one bad advantage: `torchrun -m lab.experiments.trl.demo`.

A user of TRL writes only the import of GRPOTrainer from gradloc.trl, and `gradloc=`; the rest is a plain script.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from gradloc.trl import GRPOTrainer
from lab.experiments.cpu.arithmetic import score
from lab.experiments.settings import TrlSettings
from lab.experiments.step_log import begin, log_step


class Faulty(GRPOTrainer):
    """Damage the advantage of one training token, and record which."""

    def __init__(self, *args: Any, settings: TrlSettings, record: Path, **others: Any):
        super().__init__(*args, **others)
        self.settings, self.record = settings, record
        self.fault = settings.plan()

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
        _, position = self.fault.locate(mask[row - first : row - first + 1])
        advantages = inputs["advantages"].unsqueeze(1).expand(mask.shape).clone()
        before, advantages[row - first, position] = float(advantages[row - first, position]), self.settings.advantage
        self.fault.write(
            self.record,
            row=row,
            num_rows=num_rows,
            position=position,
            token_id=int(inputs["completion_ids"][row - first, position]),
            advantage_before=before,
            advantage_planted=self.settings.advantage,
        )
        return {**inputs, "advantages": advantages}


class StepLog(TrainerCallback):
    """Log each step as verl does."""

    NAMES = {"grad_norm": "actor/grad_norm", "reward": "critic/score/mean"}

    def __init__(self, run_dir: Path):
        self.run_dir, self.started = run_dir, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            begin(state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "grad_norm" not in logs:
            return
        now = time.monotonic()
        data = {self.NAMES.get(name, name): value for name, value in logs.items() if isinstance(value, float | int)}
        data["timing_s/step"], self.started = now - self.started, now
        log_step(state.global_step, data, self.run_dir)


def right_answers(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return the demo's reward of each completion."""
    return [score(None, said[0]["content"], right) for said, right in zip(completions, answer, strict=True)]


def main(overrides: list[str]) -> None:
    settings = TrlSettings.parse(overrides)
    material, run_dir = Path(os.environ["GRADLOC_DEMO_MATERIAL"]), Path(os.environ["GRADLOC_RUN_DIR"])
    rows = str(material / "train.parquet")
    data = load_dataset("parquet", data_files=rows, split="train", cache_dir=str(run_dir / "data"))
    data = data.map(lambda row: {"answer": row["reward_model"]["ground_truth"]}).select_columns(["prompt", "answer"])
    # 2 processes x 8 micro-batches x 4 rows: 16 prompts with 4 responses each, as in the other demos
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
        callbacks=[StepLog(run_dir)],
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
