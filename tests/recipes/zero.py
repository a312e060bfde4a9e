# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO on two CPU ranks, in a plain loop and under a transformers Trainer; called on each rank.

Shapes: B rows of a micro-batch, T positions.
"""

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gradloc
from gradloc.loop.driver import AbortedBySpike

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a compiler builds it at the first start
VOCABULARY, B, T = 320, 2, 16
STEPS, SPIKE, WORTH = 4, 3, 4e3
PLANT = (1, 0, 5)
"""The rank, the row of the step's last micro-batch, and the position."""
TAU = {"tau": 20.0}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def config(stage: int, dtype: str, num_micro_batches: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": num_micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **more},
        "bf16": {"enabled": dtype == "bfloat16"},
    }


def weighted(logits: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each.view_as(weight) * weight).mean()


def train(
    stage: int,
    dtype: str = "float32",
    folder: str = "",
    action: str = "observe",
    is_planted: bool = True,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What four steps of two micro-batches leave; ``more`` for ZeRO's settings, ``settings`` for the watch."""
    deepspeed.init_distributed("gloo")
    rank, model = torch.distributed.get_rank(), llama()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, dtype, 2, **(more or {}))
    )
    watch = gradloc.Watch(engine, None, folder, action, trigger=TAU, **settings) if folder else None
    draw, norms, ended, token = torch.Generator().manual_seed(5 + rank), [], "", None
    try:
        for number in range(1, STEPS + 1):
            for micro_batch in range(2):
                ids, weight = torch.randint(VOCABULARY, (B, T + 1), generator=draw), torch.ones(B, T)
                if (number, micro_batch, rank) == (SPIKE, 1, PLANT[0]):
                    weight[PLANT[1:]], token = WORTH if is_planted else 0.0, int(ids[PLANT[1], PLANT[2] + 1])
                engine.backward(weighted(engine(input_ids=ids).logits, ids, weight))
                engine.step()
            norms.append(float(engine.get_global_grad_norm()))
    except AbortedBySpike as error:
        ended = str(error)
    weights = [] if ended else [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]
    is_off = watch is not None and watch.localizer.num_failures
    known = {"weights": weights, "norms": norms, "ended": ended, "is_off": is_off}
    return known | {"token": token, "spike": max(norms, default=0.0)}


class Weighted(Trainer):
    """A Trainer whose loss takes each token's weight from the batch."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        return weighted(model(input_ids=inputs["ids"]).logits, inputs["ids"], inputs["weight"])


def train_by_trainer(stage: int, folder: str, output: str, is_planted: bool = True, action: str = "") -> dict[str, Any]:
    """The same under accelerate: three steps of two micro-batches."""
    deepspeed.init_distributed("gloo")
    draw, rows = torch.Generator().manual_seed(5), []
    for number in range(3 * 2 * B * 2):
        weight = torch.ones(T)
        if number == 17:
            weight[PLANT[2]] = WORTH if is_planted else 0.0
        rows.append({"ids": torch.randint(VOCABULARY, (T + 1,), generator=draw), "weight": weight})
    zero = {**config(stage, "float32", 2), "train_micro_batch_size_per_gpu": "auto"}
    args = TrainingArguments(
        output,
        max_steps=3,
        per_device_train_batch_size=B,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        deepspeed=zero,
        use_cpu=True,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    callbacks = [gradloc.TrainerCallback(folder, action, trigger=TAU)] if action else []
    trainer = Weighted(llama(), args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    weights = [safe_get_full_fp32_param(param).clone() for param in trainer.model_wrapped.module.parameters()]
    return {"weights": weights}
