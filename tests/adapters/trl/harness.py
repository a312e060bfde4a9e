# SPDX-License-Identifier: Apache-2.0
"""TRL's real trainers on a tiny model that spells, with tokens planted in its advantages; on one process or two."""

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gradloc.adapters.trl.trainer import WatchedRewards
from tests.detached import let_through
from tests.world import DEVICE

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,!?"
PROMPTS = [" ".join(LETTERS[(7 * i + j) % 26] for j in range(3 + i % 5)) for i in range(64)]
SPIKE = 3
"""The optimizer step that is spoiled."""
TAU = {"trigger": {"tau": 20.0}}
"""A fixed threshold between a healthy step and a planted one."""

transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", module="trl|transformers|torch|peft")


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter."""
    names = ["<pad>", "<eos>", "<unk>", *LETTERS]
    backend = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def save_model(folder: str, dtype: torch.dtype = torch.float32, dropout: float = 0.0, experts: bool = False) -> str:
    """A random model of some 50k parameters, the same every time."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = dict(
        vocab_size=3 + len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        attention_dropout=dropout,
    )
    if experts:
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)  # TRL adds the routers' loss
        model = transformers.MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward: how many vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


class Planted:
    """Spoils one row's advantages at one optimizer step, in one token or in all of its tokens.

    ``plant``: ``what`` (``token`` or ``sequence``), ``factor`` of the advantages, ``rank``; ``tool``, the completion's
    positions [first, end) that a tool has written; ``ratio``, per ``token`` or ``sequence``, of an engine's log-probs.
    """

    plant: dict[str, Any] = {}
    where: list[tuple[int, int]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask, plant, window = output["completion_mask"], self.plant, self.args.gradient_accumulation_steps
        if "tool" in plant:
            output["tool_mask"] = torch.ones_like(mask)
            output["tool_mask"][:, slice(*plant["tool"])] = 0
            mask = mask * output["tool_mask"]
        if "ratio" in plant:  # as of an engine that is a little off
            shape = mask.shape if plant["ratio"] == "token" else (len(mask), 1)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(self._step))
            output["importance_sampling_ratio"] = (0.1 * noise).exp()
        advantages = output["advantages"].unsqueeze(1).expand(mask.shape).clone()
        output["planted"] = torch.zeros_like(mask, dtype=torch.bool)
        first = self._step // window + 1
        last = first + max(self.args.steps_per_generation * self.num_iterations // window, 1)
        is_here = first <= SPIKE < last and self.accelerator.process_index == plant.get("rank", 0)
        if is_here and plant.get("what") is not None:
            row = int((advantages[:, 0].abs() * mask.sum(-1).clamp(max=1)).argmax())
            tokens = mask[row].nonzero().flatten().tolist()
            at = tokens if plant["what"] == "sequence" else [tokens[len(tokens) // 2]]
            output["planted"][row, at] = True
            advantages[row, at] *= plant["factor"]
        is_per_row = isinstance(self, trl.RLOOTrainer)
        output["advantages"] = advantages[:, 0].clone() if is_per_row else advantages
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.present = inputs
        if "ratio" not in self.plant:
            return super()._compute_loss(model, inputs)
        self.use_vllm = True  # of the loss alone: there is no vLLM here
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


class LettingOut(Planted):
    """Trains as if nothing flowed back through the planted tokens: what ``mask`` must agree with."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **given: Any) -> Any:
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **given)
        if log_probs.requires_grad:
            kept = ~self.present["planted"]
            log_probs, entropies = let_through(kept, log_probs), let_through(kept, entropies)
        return log_probs, entropies, aux_loss


class LossReplay:
    """A loss of the user's own, in a subclass of TRL's trainer, of the log-probs that TRL's method gives."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        names = ("prompt", "completion")
        ids, mask = (torch.cat([inputs[f"{name}_{what}"] for name in names], 1) for what in ("ids", "mask"))
        kept = inputs["completion_mask"]
        log_probs, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, kept.shape[1])
        losses = -inputs["advantages"] * torch.nn.functional.softplus(log_probs - log_probs.detach().mean())
        return (losses * kept).sum() / kept.sum() / self.current_gradient_accumulation_steps


class OfLogits:
    """A loss of the user's own that asks the model for its logits."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        kept = inputs["completion_mask"]
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -kept.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
        return -(inputs["advantages"] * log_probs * kept).sum() / kept.sum() / self.current_gradient_accumulation_steps


class Noting(Planted):
    """Notes where the planted tokens came to lie."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        step = self._watch and self._watch.step
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # ranks tell each other how many rows they have
        for index, inputs in enumerate([] if step is None else step.inputs):
            for row, position in inputs["planted"].nonzero().tolist():
                self.where.append((self.state.global_step + 1, step.rows(index)[row], position))
        return norm


def kind_of(name: str, *base: Any) -> type:
    """``stock``, ``without`` (the planted tokens) or ``watched``, of these classes."""
    fronts = {"stock": (Planted,), "without": (LettingOut,), "watched": (Noting, WatchedRewards)}[name]
    return type(f"{name.title()}{base[-1].__name__}", (*fronts, *base), {})


class Noted(transformers.TrainerCallback):
    def __init__(self):
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


SMALL: dict[str, Any] = dict(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    bf16=False,
    use_cpu=DEVICE == "cpu",
    save_strategy="no",
    seed=11,
    disable_tqdm=True,
    gradient_checkpointing=False,
)
"""Settings of every run, whichever trainer: small and the same every time."""


def config_of(base: Any, folder: str, **changed: Any) -> Any:
    """The config of a run with rollouts."""
    rollouts = dict(num_generations=4, max_completion_length=12, lr_scheduler_type="linear", beta=0.0)
    kind = {"GRPOTrainer": trl.GRPOConfig, "RLOOTrainer": trl.RLOOConfig}[base.__name__]
    return kind(**{"output_dir": folder, "max_grad_norm": 1.0, **SMALL, **rollouts, **changed})


def make(
    name: str,
    folder: str,
    plant: dict[str, Any] | None = None,
    base: str = "GRPOTrainer",
    dropout: float = 0.0,
    dtype: str = "float32",
    experts: bool = False,
    lora: bool = False,
    own_loss: Any = None,
    gradloc: Any = None,
    health: Any = None,
    sharded: bool = False,
    prepare: Any = None,
    **config: Any,
) -> Any:
    """A trainer, ready to train; see :func:`kind_of`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    kind = kind_of(name, *([own_loss] if own_loss else []), getattr(trl, base))
    torch.manual_seed(7)
    made = save_model(f"{folder}-model", getattr(torch, dtype), dropout, experts)
    if dist.is_initialized():
        dist.barrier()  # transformers writes on the first process alone
    more: dict[str, Any] = {}
    if name == "watched":
        more = {"gradloc": {**TAU, **(gradloc or {})}, "health": health}
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    loading: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if sharded:
        from transformers.distributed import DistributedConfig

        loading["distributed_config"] = DistributedConfig(fsdp_size=dist.get_world_size())
    kind.plant, kind.where = plant or {}, []
    more |= {"reward_funcs": vowels, "args": config_of(getattr(trl, base), folder, **config)}
    trainer = build(kind, made, loading, {"prompt": PROMPTS}, **more)
    if prepare:
        prepare(trainer)
    return trainer


def build(kind: type, model: str, loading: dict[str, Any], columns: dict[str, list[str]], **more: Any) -> Any:
    """A trainer of this kind around the model in a folder, with data of these columns; it keeps what it logs."""
    noted = Noted()
    trainer = kind(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, **loading),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(columns),
        callbacks=[noted],
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.noted = noted
    return trainer


def stop_after(steps: int) -> Any:
    """A run's ``prepare``: its schedule is that of ``max_steps``, and it ends before."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return lambda trainer: trainer.add_callback(Stop())


def run(name: str, folder: str, **given: Any) -> dict[str, Any]:
    """Train; what that leaves behind."""
    return trained(make(name, folder, **given))


def trained(trainer: Any) -> dict[str, Any]:
    """Train; what that leaves behind: hashes of weights, optimizer and random state, what was logged, an error."""
    error = ""
    try:
        trainer.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    logs = trainer.noted.logs
    return {
        "weights": digest(trainer.accelerator.unwrap_model(trainer.model).state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": trainer.lr_scheduler.state_dict().get("_last_lr"),
        "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
        "logs": logs,
        "largest": [log["actor/grad_norm_max"] for log in logs if "actor/grad_norm_max" in log],
        "where": getattr(trainer, "where", []),
        "step": trainer.state.global_step,
        "is_finite": all(bool(part.isfinite().all()) for part in _tensors(trainer.model.state_dict())),
        "error": error,
    }


def _tensors(value: Any) -> Any:
    if isinstance(value, DTensor):
        yield value.full_tensor()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def digest(state: Any) -> str:
    """sha256 over all tensors of a state, whole."""
    hashed = hashlib.sha256()
    for tensor in _tensors(state):
        hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]
