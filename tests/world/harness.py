# SPDX-License-Identifier: Apache-2.0
"""verl's real actor around a tiny model, and the driver's part of one trainer step, without Ray.

Everything below the worker class is the real thing: DataParallelPPOActor, FSDP, the config composed
from verl's own yaml, the batch dealt out to ranks as verl's dispatch does. Runs inside a rank of
:mod:`world`.
"""

import copy
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.world import DEVICE, SHARDING
from tests.world.configs import config_of
from tests.world.models.fused import use_kernels
from tests.world.models.ulysses import attention_of_verl, plain_padding
from tests.world.oracle import actors_micro_batches

NUM_PROMPT, NUM_RESPONSE, VOCABULARY = 5, 12, 96


def other_trainer() -> Any:
    """Return the harness of the trainer that these ranks have; None for verl 0.7, whose harness this is."""
    if find_spec("verl") is None:
        return importlib.import_module("tests.adapters.trl.conformance")
    import verl

    is_07 = not verl.__version__.startswith("0.9.")
    return None if is_07 else importlib.import_module("tests.adapters.verl09.conformance")


def has_engine() -> bool:
    """Whether the ranks have another trainer than verl 0.7's actor."""
    return other_trainer() is not None


def part(name: str) -> Any:
    """A module of the package under test: ``core.ranks``."""
    return importlib.import_module(f"gradloc.{name}")


def step_class() -> type:
    """The adapter's step, which the search replays."""
    return other_trainer().step_class() if has_engine() else part("adapters.verl07.step").ActorStep


@dataclass
class Trainer:
    """One rank's view of a trainer: the actor, and the hook that every rank runs alike."""

    actor: Any
    config: Any
    gradloc: Any = None
    sequence_mesh: Any = None
    global_steps: int = 0
    train_dataset: Any = range(100)
    schedule: Any = None
    """Schedule of the learning rate; None where a test does not ask for one."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """The run's, by verl's names."""

    hook = property(lambda self: self.gradloc)
    module = property(lambda self: self.actor.actor_module)
    scaler = property(lambda self: self.actor.scaler)
    optimizer = property(lambda self: self.actor.actor_optimizer)
    grad_clip = property(lambda self: self.actor.config.grad_clip)
    settings = property(lambda self: self.actor.config.gradloc)
    driver = property(lambda self: None if self.hook is None else self.hook.spikes)
    sp_size = property(lambda self: self.actor.ulysses_sequence_parallel_size)
    dp_size = property(lambda self: dist.get_world_size() // self.sp_size)
    # Whose method takes the whole gradient, not clipped yet, and whose clips it; and their names.
    steps_in = property(lambda self: (self.actor, "_optimizer_step"))
    clips_in = property(lambda self: (self.actor, "_clip_grad_norm"))

    def __post_init__(self) -> None:
        self.tokenizer = Decoder()

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return self.dp_size

    def update(self, batch: Any) -> dict[str, Any]:
        """One trainer step on the whole batch; returns its metrics and events."""
        self.global_steps += 1
        batch.meta_info["temperature"] = 1.0
        events: list[Any] = []

        if self.hook is not None:
            self.hook.begin_step(batch, SimpleNamespace(logger=self.trackers))
            self.hook.after_advantages(batch, {})
            self.worker = SimpleNamespace(actor=self.actor, actor_lr_scheduler=self.schedule)

            def ask_all(ask: Callable) -> Any:
                answer = asked(self.worker, ask)
                events.extend(asdict(raw.event) for report in answer.meta_info.values() for raw in report.events)
                return answer

            self.actor_rollout_wg = SimpleNamespace(execute_with_func_generator=ask_all)
        return {"metrics": self._update_actor(batch).meta_info["metrics"], "events": events}

    def _update_actor(self, batch: Any) -> Any:
        return self.update_actor(batch)

    def local(self, batch: Any) -> Any:
        """This rank's rows, with the temperature that verl sends along."""
        batch.meta_info["temperature"] = 1.0
        local = batch.chunk(dist.get_world_size())[dist.get_rank()]
        local.batch.lock_()  # as it comes out of Ray
        return local

    def training_gradient(self, batch: Any) -> tuple[list[Any], float]:
        """Return the gradient that verl's own update leaves in ``.grad``, and the loss."""
        actor, caught, losses = self.actor, [], []

        def keep_gradient():
            caught.append([param.grad for param in actor.actor_module.parameters()])
            return torch.tensor(0.0)

        scaler = actor.scaler

        def keep_loss(loss):
            losses.append(loss)
            return loss if scaler is None else scaler.scale(loss)

        actor._optimizer_step, actor.scaler = keep_gradient, SimpleNamespace(scale=keep_loss)
        actor.update_policy(self.local(batch))
        del actor._optimizer_step
        actor.scaler = scaler
        return caught[0], float(sum(loss.detach() for loss in losses))

    def analyze(self, batch: Any) -> dict[str, Any]:
        """Return the worker's answer to a request for an analysis."""
        asked, local = part("adapters.verl07.hook").ASKED_KEY, self.local(batch)
        part("adapters.verl07.hook").watch_actor(SimpleNamespace(actor=self.actor, actor_lr_scheduler=None))
        request = {name: value for name, value in batch.meta_info.items() if name.startswith("gradloc_num")}
        local.meta_info = {"temperature": 1.0, asked: request}
        return type(self.actor).update_policy(self.actor, local)[asked]  # a test may have broken this one's

    @contextmanager
    def broken_loss(self, broken: Callable) -> Iterator[None]:
        """While this is the loss."""
        self.actor.update_policy = broken
        try:
            yield
        finally:
            del self.actor.update_policy

    def update_by_hand(self, batch: Any, stage: torch.Tensor, name: str) -> None:
        """One update on these tokens, (R, T), of the batch, whose advantages elsewhere are 0."""
        # of a run in which something is on
        self.actor.gradloc = part("adapters.verl07.hook").ActorHook(self.actor, part("config").GradLocConfig())
        batch.meta_info["temperature"] = 1.0
        batch.batch["lopti_mask"] = stage
        self.update_actor(batch)

    def update_actor(self, batch: Any) -> Any:
        """Deal the rows out, update, and bring the metrics together, as verl's worker group does."""
        local = batch.chunk(self.dp_size)[dist.get_rank() // self.sp_size]
        with self.without_flash_attention():
            metrics = self.actor.update_policy(local)
        if self.schedule is not None:
            self.worker.actor_lr_scheduler.step()
        return answer_of(batch, metrics)

    @contextmanager
    def without_flash_attention(self) -> Iterator[None]:
        """Surround an update as verl's worker does, and replace what flash attention would do."""
        from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager

        attention = nullcontext()
        if self.actor.use_remove_padding:
            attention = plain_padding() if self.sequence_mesh is None else attention_of_verl()
        with attention, FSDPUlyssesShardingManager(self.sequence_mesh):
            yield

    def micro_batches(self, model: torch.nn.Module, batch: Any) -> Any:
        """The oracle's."""
        return actors_micro_batches(self.actor, model, batch)

    def weights_hash(self) -> str:
        """sha256 over this rank's weight shards and optimizer state."""
        return hash_weights(self.actor.actor_module, self.actor.actor_optimizer)


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


def answer_of(batch: Any, metrics: dict[str, Any]) -> Any:
    """Return the worker group's answer, with every rank's value of each metric; ``metrics`` are this rank's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    output = copy.copy(batch)
    output.meta_info = {"metrics": {key: [of_rank[key] for of_rank in everyone] for key in everyone[0]}}
    return output


def asked(worker: Any, ask: Callable) -> Any:
    """Run a function on every worker; return the answer of verl's worker group."""
    from verl import DataProto

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ask(worker).meta_info)
    return DataProto(meta_info={key: value for of_rank in everyone for key, value in of_rank.items()})


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
    from transformers import AttentionMaskInterface, AutoModelForCausalLM

    if not has_engine():  # transformers 5 asks a mask for other things
        AttentionMaskInterface.register("sdpa", plain_mask)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config(dropout))


def model_config(dropout: float = 0.0) -> Any:
    """transformers' config of the tiny model."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attention_dropout=dropout,
        attn_implementation="sdpa",
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


def make_config(overrides: list[str], dump_dir: str) -> Any:
    """verl's ppo_trainer config, for the tiny model."""
    base = [
        f"actor_rollout_ref.actor.strategy={SHARDING}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",  # a third of an update; who means it says so
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=1",
        "trainer.project_name=tests",
        "trainer.experiment_name=harness",
    ]
    if find_spec("verl.utils.gradloc_seam") is not None:  # absent from unpatched verl, the baseline
        base.append(f"actor_rollout_ref.actor.bisect_dump_dir={dump_dir}")
    return config_of(base + overrides)


def make_trainer(
    overrides: list[str], dump_dir: str, dropout: float = 0.0, model: torch.nn.Module | None = None
) -> Trainer:
    """An actor on this world's ranks and the matching driver (None when spike_detection is off).

    ``model``: another than the tiny one.
    """
    if has_engine():
        return other_trainer().make_trainer(overrides, dump_dir, dropout, model)
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    if dist.get_rank() != 0:  # in verl one process, the trainer's, writes
        dump_dir = f"{dump_dir}-rank{dist.get_rank()}"
    config = make_config([override for override in for_verl(overrides) if override != "lora"], dump_dir)
    trainer = Trainer(None, config)
    try:
        from verl.utils.gradloc_seam import Off, build_trainer_hook
    except ImportError:  # unpatched verl, the baseline of the bit-identity tests
        pass
    else:
        hook = build_trainer_hook(trainer)
        trainer.gradloc = None if isinstance(hook, Off) else hook
    actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    sp_size = actor_config.ulysses_sequence_parallel_size
    actor_config.ppo_mini_batch_size //= dist.get_world_size() // sp_size
    model = model_of(overrides, dropout) if model is None else model
    use_kernels(model, config.actor_rollout_ref.model)
    module = shard(model.to(DEVICE), actor_config, config.actor_rollout_ref.model)
    trainable = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=actor_config.optim.lr)
    torch.manual_seed(1000)
    actor = DataParallelPPOActor(actor_config, module, optimizer)
    if actor.scaler is not None:
        actor.scaler = own_scaler()
    trainer.actor = actor
    if sp_size > 1:
        trainer.sequence_mesh = init_device_mesh(DEVICE, (trainer.dp_size, sp_size), mesh_dim_names=("dp", "sp"))
    return trainer


def own_scaler() -> Any:
    """verl's own scaler asks for CUDA and switches itself off without; and a start that the tiny model stands."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device=DEVICE, init_scale=8.0, growth_interval=400)


def log_probs(trainer: Any, batch: Any, micro_batch_size: int = 2) -> torch.Tensor:
    """Return the actor's log-prob of each response token, (B, T)."""
    if has_engine():
        return trainer.log_probs(batch)
    data = batch.select(["responses", "input_ids", "attention_mask", "position_ids"], [], [])
    data.meta_info = {"micro_batch_size": micro_batch_size, "temperature": 1.0, "use_dynamic_bsz": False}
    return trainer.actor.compute_log_prob(data)[0]


class Decoder:
    """Stands where a tokenizer stands: token 7 reads ``t7``. The demo's tests use a real one."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"t{token}" for token in ids)


def shard(module: torch.nn.Module, actor_config: Any, model_config: Any) -> torch.nn.Module:
    """Wrap as verl's FSDP worker does: ``strategy`` fsdp or fsdp2, or not at all on ``none``."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, get_shard_placement_fn
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.fsdp_workers import create_device_mesh, get_sharding_strategy

    fsdp = actor_config.fsdp_config
    dtype = PrecisionType.to_dtype(fsdp.dtype)
    reduced_in = PrecisionType.to_dtype((fsdp.get("mixed_precision") or {}).get("reduce_dtype", "fp32"))
    if model_config.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = create_device_mesh(world_size=dist.get_world_size(), fsdp_size=fsdp.fsdp_size)
    if actor_config.strategy == "fsdp":
        return FullyShardedDataParallel(
            module,
            auto_wrap_policy=get_fsdp_wrap_policy(module=module, config=None, is_lora=False),
            device_id=torch.device(DEVICE),
            sharding_strategy=get_sharding_strategy(mesh, fsdp.reshard_after_forward),
            mixed_precision=MixedPrecision(dtype, reduced_in, torch.float32),
            device_mesh=mesh,
            use_orig_params=fsdp.use_orig_params,
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced_in, cast_forward_inputs=True)
    kwargs = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": fsdp.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if fsdp.offload_policy else None,  # pinned for a GPU alone
        "shard_placement_fn": get_shard_placement_fn(fsdp_size=mesh.shape[-1]),
    }
    apply_fsdp2(module, kwargs, fsdp)
    return module


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
        return other_trainer().Rows(tensors, others)
    from verl import DataProto

    return DataProto.from_dict(tensors=tensors, non_tensors=others)
