# SPDX-License-Identifier: Apache-2.0
"""What every trainer of the suite has in common: a tiny model, batches, and how a step of it is run and read.

An adapter's `conformance.py` builds its trainer, and says how it makes a step and which loss it has. Runs inside a rank
of :mod:`tests.world`.
"""

import copy
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.world import DEVICE, trainer_folder
from tests.world.oracle import MicroBatch, plain_outputs
from tests.world.settings import require

NUM_PROMPT, NUM_RESPONSE, VOCABULARY = 5, 12, 96


def adapter() -> Any:
    """Return the `conformance.py` of the trainer that these ranks have."""
    return importlib.import_module(f"tests.adapters.{trainer_folder()}.conformance")


def part(name: str) -> Any:
    """A module of the package under test: ``core.ranks``."""
    return importlib.import_module(f"gradloc.{name}")


def step_class() -> type:
    """Return the adapter's step, which the search replays: the class that its ``STEP`` names."""
    module, name = adapter().STEP.rsplit(".", 1)
    return getattr(part(module), name)


def make_trainer(
    overrides: list[str], dump_dir: str, dropout: float = 0.0, model: torch.nn.Module | None = None
) -> "HeldTrainer":
    """Make a trainer on this world's ranks, without ours where the overrides ask for nothing of it.

    ``model``: another than the tiny one.
    """
    made = adapter().make_trainer(overrides, dump_dir, dropout, model)
    sizes = [override.partition("ppo_mini_batch_size=")[2] for override in overrides]
    made.batch_size = next((int(size) for size in reversed(sizes) if size), None)
    torch.manual_seed(1000)
    return made


class HeldTrainer:
    """One rank's view of a trainer, which an adapter's subclass completes.

    It also has ``module``, ``optimizer``, ``driver`` (on the first rank), and ``clips_in``: the owner and the name of
    the method that clips.
    """

    global_steps = 0
    scaler: Any = None
    rows_each = 4
    """Rows of a micro-batch."""
    rows_per_step: int | None = None
    """A rank's rows in an optimizer step; None: all."""
    batch_size: int | None = None
    """All ranks' rows in an optimizer step, as the scenario has it; None: as many as the batch has."""
    has_entropy = False
    """Whether the loss has a term of entropies."""
    has_driver = False
    """Whether one process of its own decides for all, and sends nothing in a healthy step."""
    is_sharded = False
    """Whether a rank's forward waits for the others'."""
    has_logits = True
    """Whether the log-probs are computed from logits that the model returns."""
    trains_padding = False
    """Whether padding has a gradient."""

    dp_size = cached_property(lambda self: dist.get_world_size())
    trackers: Any = cached_property(lambda self: {})
    """The run's, by verl's names."""

    def run(self, batch: Any) -> dict[str, Any]:
        """Make one step of the trainer on the whole batch; return its metrics as :func:`as_lists` does."""
        raise NotImplementedError

    def loss(self, batch: Any, rows: slice, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of these rows, a micro-batch, from a plain model's log-probs and entropies (B, T)."""
        raise NotImplementedError

    def letting_out(self, let_out: "LetOut") -> AbstractContextManager[Any]:
        """Pass the log-probs of training's forward through ``let_out``."""
        raise NotImplementedError

    def pictures(self, batch: Any, rows: slice) -> dict[str, Any]:
        """Return what else a plain model is given."""
        return {}

    def update(self, batch: Any) -> dict[str, Any]:
        """Make one step on the whole batch; return its metrics and events, the same on all ranks."""
        makes_one = self.rows_per_step is None
        require(not makes_one or self.batch_size in (None, len(batch)), "it makes one optimizer step of a batch")
        self.global_steps += 1
        with reported_events() as events:
            metrics = self.run(batch)
        everyone = everyones((metrics, events))
        return {"metrics": everyone[0][0], "events": [event for _, found in everyone for event in found]}

    def deal(self, batch: Any) -> Iterator[tuple[int, int, slice]]:
        """Yield rank, number and rows of each micro-batch of the first optimizer step."""
        each = len(batch) // self.dp_size
        for rank in range(self.dp_size):
            first, end = rank * each, rank * each + (self.rows_per_step or each)
            for index, start in enumerate(range(first, end, self.rows_each)):
                yield rank, index, slice(start, min(start + self.rows_each, end))

    def own_rows(self, batch: Any) -> list[slice]:
        """Return the rows of each of this rank's micro-batches."""
        return [rows for rank, _, rows in self.deal(batch) if rank == dist.get_rank()]

    def micro_batches(self, model: torch.nn.Module, batch: Any) -> Iterator[MicroBatch]:
        """Yield the oracle's micro-batches: a plain model's log-probs, and the trainer's loss of them."""
        names = ("input_ids", "attention_mask", "response_mask")
        for rank, index, rows in self.deal(batch):
            ids, attention, mask = (batch.batch[name][rows] for name in names)
            log_prob, entropy = plain_outputs(model, ids, attention, mask.shape[1], **self.pictures(batch, rows))
            loss = partial(self.loss, batch, rows)
            yield MicroBatch(rank, index, mask, log_prob, entropy if self.has_entropy else None, loss)

    def weights_hash(self) -> str:
        """Return the sha256 of this rank's weight shards and optimizer state."""
        return hash_weights(self.module, self.optimizer)


@contextmanager
def reported_events() -> Iterator[list[dict[str, Any]]]:
    """Collect the events that this rank reports meanwhile."""
    events: list[dict[str, Any]] = []
    if find_spec("gradloc") is None:
        yield events
        return
    kind = part("loop.localizer").Localizer
    report = kind.report

    def reported(*given: Any) -> Any:
        made = report(*given)
        events.extend(asdict(raw.event) for raw in made.events)
        return made

    with mock.patch.object(kind, "report", reported):
        yield events


def as_lists(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics as verl 0.7's trainer has them: a list, and of the workers' metrics a list of each rank's."""
    found = {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}
    return {name: [value] if name.startswith(("actor/", "lopti/")) else value for name, value in found.items()}


class LetOut:
    """Detaches planted tokens.

    Args:
        plants: row of the batch, response position, and advantage of each.
        batch: the whole one.
    """

    def __init__(self, plants: Iterable[tuple[int, int, float]], batch: Any):
        responses, lengths = batch.batch["responses"], batch.batch["attention_mask"][:, NUM_PROMPT:].sum(1).tolist()
        self._targets = [(responses[row, : lengths[row]], position) for row, position, _ in plants]

    def kept(self, responses: torch.Tensor) -> torch.Tensor:
        """Return bool (B, T), False at the planted tokens of these responses (B, T)."""
        kept = torch.ones_like(responses, dtype=torch.bool)
        for ids, position in self._targets:
            if len(ids) <= responses.shape[1]:
                kept[(responses[:, : len(ids)] == ids).all(1), position] = False
        return kept

    def __call__(self, responses: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return values (B, T) of these responses (B, T), those of planted tokens detached."""
        return None if values is None else torch.where(self.kept(responses), values, values.detach())


def hash_weights(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 over this rank's weight shards and optimizer state."""
    state = [value for p in module.parameters() for _, value in sorted(optimizer.state.get(p, {}).items())]
    return digest_of([*module.parameters(), *state])


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 over this rank's part of each."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(local_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def everyones(value: Any) -> list[Any]:
    """Return all ranks' values, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def answer_of(batch: Any, metrics: dict[str, Any]) -> Any:
    """Return the worker group's answer, with every rank's value of each metric; ``metrics`` are this rank's."""
    everyone = everyones(metrics)
    output = copy.copy(batch)
    output.meta_info = {"metrics": {key: [of_rank[key] for of_rank in everyone] for key in everyone[0]}}
    return output


def asked(worker: Any, ask: Callable) -> Any:
    """Run a function on every worker; return the answer of verl's worker group."""
    from verl import DataProto

    return DataProto(
        meta_info={key: value for of_rank in everyones(ask(worker).meta_info) for key, value in of_rank.items()}
    )


@contextmanager
def lines_of(logger: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the logger's lines meanwhile, from that level on."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


def plain_mask(
    batch_size: int, cache_position: torch.Tensor, kv_length: int, attention_mask: Any = None, **kwargs: Any
) -> torch.Tensor | None:
    """(B, 1, T, T): causal, without padding. transformers' own goes through vmap, half of a tiny model's forward."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    is_plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if attention_mask is None or attention_mask.all() or not is_plain or kwargs.get("kv_offset"):
        return sdpa_mask(batch_size, cache_position, kv_length, attention_mask=attention_mask, **kwargs)
    causal = torch.arange(kv_length, device=cache_position.device) <= cache_position[:, None]
    return causal & attention_mask.bool()[:, None, None, :kv_length]


def make_model(seed: int = 0, dropout: float = 0.0) -> torch.nn.Module:
    """A random Qwen3 of about 60k parameters in float32."""
    from transformers import AttentionMaskInterface, AutoModelForCausalLM, __version__

    if __version__ < "5":  # which asks a mask for other things
        AttentionMaskInterface.register("sdpa", plain_mask)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config(dropout))


def model_config(dropout: float = 0.0, **sizes: int) -> Any:
    """transformers' config of the tiny model; ``sizes`` replace its own."""
    from transformers import Qwen3Config

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attention_dropout=dropout,
        attn_implementation="sdpa",
        **{**tiny, "max_position_embeddings": 64, **sizes},
    )


def model_of(overrides: list[str], dropout: float = 0.0) -> torch.nn.Module:
    """The tiny model that the test itself names: with adapters (``lora``), or of experts (``experts=mixtral``)."""
    model = experts_of(overrides) or make_model(dropout=dropout)
    return add_adapters(model) if "lora" in overrides else model


def experts_of(overrides: list[str]) -> torch.nn.Module | None:
    """The mixture of experts that is asked for by ``experts=KIND``; None without."""
    from tests.world.models.experts import make_experts

    kinds = [override.removeprefix("experts=") for override in overrides if override.startswith("experts=")]
    return make_experts(kinds[0]) if kinds else None


def for_verl(overrides: list[str]) -> list[str]:
    """Without ``experts=KIND``, which is the test's own."""
    return [override for override in overrides if not override.startswith("experts=")]


def add_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """LoRA as verl's worker adds it; the second factor is not zero, so that both have gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(model, config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    return model


def own_scaler() -> Any:
    """verl's own scaler asks for CUDA and switches itself off without; and a start that the tiny model stands."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device=DEVICE, init_scale=8.0, growth_interval=400)


class Decoder:
    """Stands where a tokenizer stands: token 7 reads ``t7``. The demo's tests use a real one."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"t{token}" for token in ids)


def make_batch(num_rows: int = 16, seed: int = 0, noise: float = 0.3, rollout_noise: float | None = None) -> Any:
    """A batch as after the advantages: ragged responses, pairs of rows share a uid.

    ``rollout_noise``: with log-probs of the rollout, this far (standard deviation) from the old.
    """
    import numpy as np

    generator = torch.Generator().manual_seed(seed)
    total = NUM_PROMPT + NUM_RESPONSE
    input_ids = torch.randint(3, VOCABULARY, (num_rows, total), generator=generator)
    lengths = torch.randint(NUM_RESPONSE // 2, NUM_RESPONSE + 1, (num_rows,), generator=generator)
    response_mask = (torch.arange(NUM_RESPONSE)[None] < lengths[:, None]).long()
    attention_mask = torch.cat([torch.ones(num_rows, NUM_PROMPT, dtype=torch.long), response_mask], 1)
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    shape = (num_rows, NUM_RESPONSE)
    old = -4.5 + noise * torch.randn(shape, generator=generator)
    advantages = torch.randn(num_rows, 1, generator=generator).expand(shape).clone() * response_mask
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "responses": input_ids[:, -NUM_RESPONSE:],
        "response_mask": response_mask,
        "old_log_probs": old,
        "advantages": advantages,
        "ref_log_prob": old + noise * torch.randn(shape, generator=generator),
        "token_level_scores": torch.randn(shape, generator=generator) * response_mask,
    }
    if rollout_noise is not None:
        tensors["rollout_log_probs"] = old + rollout_noise * torch.randn(shape, generator=generator)
    uids = np.array([f"prompt-{row // 2}" for row in range(num_rows)], dtype=object)
    sources = np.array(["arithmetic"] * num_rows, dtype=object)
    images = np.array([{} for _ in range(num_rows)], dtype=object)  # what verl's agent loop gives text
    others = {"uid": uids, "data_source": sources, "multi_modal_inputs": images}
    if find_spec("verl") is None:
        input_ids[1::2, :NUM_PROMPT] = input_ids[::2, :NUM_PROMPT]  # who knows siblings by their prompt
        return Rows(tensors, others)
    from verl import DataProto

    return DataProto.from_dict(tensors=tensors, non_tensors=others)


@dataclass
class Rows:
    """A batch, where verl has its DataProto."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.batch["responses"])
