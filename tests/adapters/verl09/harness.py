# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's own worker and trainer around the tiny model, without Ray; runs inside a rank of :mod:`tests.world`.

Everything on both sides of Ray is the real thing: the config is composed from verl's yaml, the worker is its
`ActorRolloutRefWorker` with an engine from its registry, and a step is the V1 trainer's `_update_actor`. What stands
in for Ray is a function call, and for TransferQueue a dictionary. Batches are `tests.world.harness`'s, so that the
same scenario can be run on this and on verl 0.7's actor.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradloc.loop.messages import RankReport
from tests.world import DEVICE, SHARDING
from tests.world.configs import config_of
from tests.world.harness import (
    NUM_PROMPT,
    Decoder,
    add_adapters,
    asked,
    hash_weights,
    make_batch,
    make_model,
    own_scaler,
)
from tests.world.models.fused import for_one_model

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
ADAPTER = "adapter"
PER_TOKEN = ("old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs")
DISTILLED = [
    "distillation.enabled=true",
    "distillation.n_gpus_per_node=2",
    "distillation.nnodes=1",
    "distillation.teacher_models.teacher_model.model_path=asked",
    *(f"distillation.distillation_loss.{name}" for name in ("use_task_rewards=false", "loss_max_clamp=null")),
]
PER_TOKEN += ("rm_scores", "values", "returns", "rollout_is_weights", "lopti_mask")


def save_model(folder: str, model: torch.nn.Module | None = None) -> None:
    """The tiny model with random weights, the same each time, and an adapter beside it; or another. Rank 0 writes."""
    if dist.get_rank() == 0 and model is not None:
        model.save_pretrained(folder)
    elif dist.get_rank() == 0:
        make_model().save_pretrained(folder)
        add_adapters(make_model()).save_pretrained(f"{folder}/{ADAPTER}")
    dist.barrier()


COMMON = [
    f"+{MODEL}.load_tokenizer=false",
    f"{ACTOR}.use_torch_compile=false",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=vllm",  # asked for, and not built
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    f"trainer.device={DEVICE}",
    "trainer.project_name=tests",
    "trainer.experiment_name=harness",
]
"""Overrides of every run, whichever engine."""


def make_config(overrides: list[str], model_dir: str) -> Any:
    """verl's ppo_trainer config for the tiny model: FSDP2 in float32, packed, micro-batches by number of tokens."""
    base = [
        f"{MODEL}.path={model_dir}",
        f"{MODEL}.enable_gradient_checkpointing=false",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{ACTOR}.strategy={SHARDING}",
        f"{ACTOR}.fsdp_config.dtype=float32",
        f"+{ACTOR}.fsdp_config.mixed_precision={FP32}",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=48",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    ]
    config = config_of(COMMON + base + overrides)
    if config.actor_rollout_ref.model.lora_rank:  # a new one's second factor is 0, and so its first has no gradient
        config.actor_rollout_ref.model.lora_adapter_path = f"{model_dir}/{ADAPTER}"
    return config


def own_folder(config: Any) -> None:
    """There is one trainer, and here there are two: each writes to its own folder."""
    if "gradloc" in config.actor_rollout_ref.actor and dist.get_rank() > 0:
        config.actor_rollout_ref.actor.gradloc.dump_dir += f"-rank{dist.get_rank()}"


@dataclass
class Trainer:
    """One rank's worker, and the trainer that every rank runs alike."""

    worker: Any
    trainer: Any
    store: "Store" = field(default_factory=lambda: Store())
    dp_size: int = 1
    of_workers: dict[str, Any] = field(default_factory=dict)  # the last update's metrics, before the trainer's part
    reports: list[Any] = field(default_factory=list)  # of the last update, from each process
    trackers: dict[str, Any] = field(default_factory=dict)  # the run's, by verl's names

    make_config = staticmethod(make_config)

    engine = property(lambda self: self.worker.actor.engine)

    def weights_hash(self) -> str:
        """sha256 over this rank's weight shards and optimizer state."""
        return hash_weights(self.engine.module, self.engine.optimizer)

    def update(self, batch: Any) -> dict[str, Any]:
        """One step on the whole batch; returns the trainer's metrics.

        Args:
            batch: as `make_batch` returns it.
        """
        self.trainer.global_steps += 1
        metrics: dict[str, Any] = {}
        with self.store:
            meta = self.store.add(batch)
            if hasattr(self.trainer, "gradloc"):
                if self.trackers:
                    self.trainer.logger = SimpleNamespace(logger=self.trackers)
                    self.trainer.on_train_begin()
                self.trainer.gradloc.reweight(as_update(self.trainer, meta), {})
            self.trainer._update_actor(meta, metrics)
        return metrics

    def ask(self, ask: Any) -> Any:
        """Run a function on every worker; return the answer of verl's worker group."""
        answer = asked(self.worker, ask)
        reports = [each for each in answer.meta_info.values() if isinstance(each, RankReport)]
        self.reports = sorted(reports, key=lambda report: report.process) or self.reports
        return answer

    def _dealt_out(self, meta: Any) -> Any:
        """This rank's rows, with all that is sent along."""
        from verl.utils import tensordict_utils as tu

        local = meta.chunk(self.dp_size)[self.engine.get_data_parallel_rank()]
        data = self.store.get(local.keys, local.partition_id, local.fields)
        tu.assign_non_tensor(data, **copy.deepcopy(meta.extra_info))
        return data

    def compute_log_prob(self, meta: Any) -> None:
        """Deal the rows out, and run a forward."""
        self.worker.compute_log_prob(self._dealt_out(meta))

    def update_actor(self, meta: Any) -> Any:
        """Deal the rows out, update, and return the first rank's metrics, as verl's worker group does."""
        from verl.utils import tensordict_utils as tu

        output = self.worker.update_actor(self._dealt_out(meta))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if output is None else tu.get(output, "metrics"))
        (first, *_) = [metrics for metrics in everyone if metrics is not None]  # a pipeline's last stage has them
        self.of_workers = dict(first)
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": first})


class Store:
    """In place of TransferQueue, which needs Ray: rows by key, nested when they are read."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, batch: Any) -> Any:
        """Take in a padded batch row by row, as verl's agent loop does; returns its `KVBatchMeta`."""
        from transfer_queue import KVBatchMeta

        self.rows = {}
        tags = []
        for index in range(len(batch)):
            row = _row(batch, index)
            self.rows[f"{row['uid']}_{index % 2}_0"] = row
            lengths = {"prompt_len": len(row["prompts"]), "response_len": len(row["responses"])}
            versions = {"min_global_steps": 3, "max_global_steps": 4}
            tags.append({**lengths, **versions, "seq_len": sum(lengths.values()), "status": "success"})
        return KVBatchMeta(keys=list(self.rows), tags=tags, partition_id="train")

    # What transfer_queue's functions of the name `kv_...` do.

    def get(self, keys: Any, partition_id: Any = None, select_fields: Any = None) -> Any:
        from tensordict import TensorDict
        from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

        rows = [self.rows[key] for key in keys]
        pack = AsyncSimpleStorageManager._pack_field_values
        wanted = [name for name in select_fields or rows[0].keys() if name in rows[0]]
        return TensorDict({name: pack([row[name] for row in rows]) for name in wanted}, batch_size=len(rows))

    def put(self, keys: Any, partition_id: Any = None, fields: Any = None, tags: Any = None) -> Any:
        from transfer_queue import KVBatchMeta

        for index, key in enumerate(keys):
            self.rows[key].update({name: values[index] for name, values in fields.items()})
        return KVBatchMeta(keys=keys, tags=tags or [{}] * len(keys), partition_id=partition_id)

    def clear(self, keys: Any, partition_id: Any = None) -> None:
        for key in keys:
            del self.rows[key]

    def list(self, partition_id: Any = None) -> dict[str, Any]:
        return {"train": dict.fromkeys(self.rows, {})}

    def __enter__(self) -> "Store":
        import transfer_queue

        ours = {"kv_batch_get": self.get, "kv_batch_put": self.put, "kv_clear": self.clear, "kv_list": self.list}
        self._patch = mock.patch.multiple(transfer_queue, **ours)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _row(batch: Any, index: int) -> dict[str, Any]:
    tensors = {name: values[index] for name, values in batch.batch.items()}
    length = int(tensors["attention_mask"].sum()) - NUM_PROMPT
    ids = tensors["input_ids"][: NUM_PROMPT + length]
    mask = tensors["response_mask"][:length]
    taught = tensors["advantages"] - 4.5  # as far from what a student is like as the advantages say
    teacher = torch.nn.functional.pad(taught[:length], (NUM_PROMPT - 1, 1))
    return {
        "prompts": ids[:NUM_PROMPT],
        "responses": ids[NUM_PROMPT:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)).expand(*tensors["position_ids"].shape[:-1], len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "teacher_logprobs": teacher.unsqueeze(-1),
        "rm_scores": tensors["token_level_scores"][:length],  # as the queue calls them
        **{name: tensors[name][:length] for name in PER_TOKEN if name in tensors},
        **{name: values.reshape(-1) for name, values in tensors.items() if name.startswith("gradloc_")},
        **{name: values[index] for name, values in batch.non_tensor_batch.items()},
    }


def make_trainer(overrides: list[str], model_dir: str, stock: bool = False, kind: type[Trainer] = Trainer) -> Trainer:
    """A worker on this world's ranks, and the trainer that the config names, as a `Trainer` of that ``kind``.

    ``stock``: verl's own, which knows nothing of ours.
    """
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass

    config = kind.make_config(overrides, model_dir)
    own_folder(config)
    taught = config.distillation if config.distillation.enabled else None
    given = {"role": "actor", "distillation_config": taught}
    worker = DetachActorWorker(config.actor_rollout_ref, **given)  # separate_async's; it adds to verl's own
    with for_one_model():
        worker.init_model()
    if getattr(worker.actor.engine, "scaler", None) is not None:
        worker.actor.engine.scaler = own_scaler()
    torch.manual_seed(1000)
    trainer_class = get_trainer_cls(config.trainer.v1.trainer_mode)
    trainer = (trainer_class.__bases__[-1] if stock else trainer_class)(config)
    trainer.global_steps = 0
    trainer.distillation_config = None if taught is None else omega_conf_to_dataclass(taught)
    if hasattr(trainer, "gradloc"):
        from gradloc.adapters.verl_common.requirements import tables_for

        trainer.gradloc.build_drivers(trainer.config, Decoder(), tables_for(trainer.config))
    made = kind(worker, trainer, dp_size=worker.actor.engine.get_data_parallel_size())
    trainer.actor_rollout_wg = SimpleNamespace(
        update_actor=made.update_actor,
        compute_log_prob=made.compute_log_prob,
        execute_with_func_generator=made.ask,
        _dispatch_info={"actor": list(range(made.dp_size))},
    )
    return made


def train(
    overrides: list[str],
    model_dir: str,
    num_steps: int = 2,
    plants: tuple[tuple[int, int, float], ...] = (),
    stock: bool = False,
    kind: type[Trainer] = Trainer,
) -> dict[str, Any]:
    """Real updates, each on a batch of its own; what they leave behind. See :func:`make_trainer`.

    ``plants``: row, response position and advantage, put into the last step's batch.
    """
    trainer = make_trainer(overrides, model_dir, stock=stock, kind=kind)
    steps = []
    for step in range(1, num_steps + 1):
        batch = make_batch(seed=step)
        for row, position, advantage in plants if step == num_steps else ():
            batch.batch["advantages"][row, position] = advantage
        steps.append(trainer.update(batch))
    return {
        "engine": [kind.__name__ for kind in type(trainer.engine).__mro__],
        "norms": [float(metrics["actor/grad_norm"]) for metrics in steps],
        "metrics": steps[-1],
        "weights": trainer.weights_hash(),
        "rng": torch.get_rng_state().numpy().tobytes(),
    }


def train_with_an_engine_of_its_own(overrides: list[str], model_dir: str) -> dict[str, int]:
    """Two updates, the second with a planted token, of an engine that overrides two of verl's methods; their calls."""
    from collections import Counter

    made, calls = make_trainer(overrides, model_dir), Counter()
    verl = type(made.engine)

    class Own(verl):
        def optimizer_step(self) -> Any:
            calls["optimizer_step"] += 1
            return super().optimizer_step()

        def forward_step(self, *args: Any, **given: Any) -> Any:
            calls["forward_step"] += 1
            return super().forward_step(*args, **given)

    made.engine.__class__ = Own
    for step in (1, 2):
        batch = make_batch(seed=step)
        if step == 2:
            batch.batch["advantages"][5, 3] = 1e4
        made.update(batch)
    return dict(calls)


HEALTHY = 23


def train_until_ratios_run_away(overrides: list[str], model_dir: str) -> list[float]:
    """Healthy updates of two epochs; between the last two the head goes far, against its first moment."""
    made = make_trainer([*overrides, f"{ACTOR}.ppo_epochs=2", *UNCLIPPED], model_dir)
    (head,) = (param for name, param in made.engine.module.named_parameters() if name.endswith("lm_head.weight"))
    norms = [float(made.update(make_batch(seed=step % 7))["actor/grad_norm"]) for step in range(HEALTHY)]
    take, factors = made.engine.optimizer_step, iter((-1500.0, 1.0))

    def optimizer_step() -> Any:
        made.engine.optimizer.state[head]["exp_avg"].mul_(next(factors))
        return take()

    with mock.patch.object(made.engine, "optimizer_step", optimizer_step):
        return [*norms, float(made.update(make_batch(seed=HEALTHY % 7))["actor/grad_norm"])]


UNCLIPPED = [f"{ACTOR}.clip_ratio_{name}=1e9" for name in ("low", "high", "c")]


CYCLE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=3",
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=false",
    "data.train_batch_size=48",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


def train_in_a_cycle(
    overrides: list[str], model_dir: str, plants: tuple[tuple[int, int, float], ...], stock: bool = False
) -> dict[str, Any]:
    """One step of the trainer whose step has several updates, with the weights put aside and back between them.

    ``plants``: row, response position and advantage, put into the batches of the second and third update.
    """
    from verl.checkpoint_engine import CheckpointEngineRegistry

    class Nowhere:
        """In place of what sends weights to rollouts on other machines."""

        def __init__(self, **_: Any):
            pass

    with mock.patch.dict(CheckpointEngineRegistry._registry, nccl=Nowhere):
        made = make_trainer([*CYCLE, *overrides], model_dir, stock=stock)
    trainer, worker = made.trainer, made.worker
    trainer.global_steps = 1

    def step_once(metrics: dict[str, Any], timing: Any, size: int) -> Any:
        number = trainer.local_trigger_step
        worker.save_model_to_cpu(number)
        if number > 0:  # verl then computes old log-probs
            worker.restore_model_from_cpu(0)
            worker.restore_model_from_cpu(number)
        batch = make_batch(seed=(0, 3, 7)[number])  # the ratio of row 5's token 3 is not clipped in the latter two
        batch.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"] + f"-{number}"
        for row, position, advantage in plants if number > 0 else ():
            batch.batch["advantages"][row, position] = advantage
        return trainer._update_actor(made.store.add(batch), metrics)

    metrics: dict[str, Any] = {}
    with made.store, mock.patch.object(trainer, "_step_once", step_once), mock.patch.object(trainer, "prepare_step"):
        trainer.prepare_step.return_value = {}
        batch = trainer.step(metrics, {})
    if hasattr(trainer, "gradloc"):
        trainer.gradloc.after_metrics(batch, metrics, trainer.global_steps)
    return {"metrics": metrics, "weights": made.weights_hash(), "rng": torch.get_rng_state().numpy().tobytes()}


def judged(overrides: list[str], model_dir: str) -> dict[str, float]:
    """The metrics of one step, as the trainer leaves them."""
    made = make_trainer(overrides, model_dir)
    batch = make_batch(seed=6)
    metrics = made.update(batch)
    with made.store:
        made.trainer.gradloc.after_metrics(made.store.add(batch), metrics, 1)
    return metrics


def reweighted(overrides: list[str], model_dir: str, alpha: float) -> dict[str, Any]:
    """Advantages in the store after the trainer's part, against the formula of arXiv 2505.12929."""
    made = make_trainer([*overrides, f"algorithm.advantage_reweighting.alpha={alpha}"], model_dir)
    batch, metrics = make_batch(seed=3), {}
    with made.store:
        meta = made.store.add(batch)
        made.trainer.gradloc.reweight(as_update(made.trainer, meta), metrics)
        found = made.store.get(meta.keys, select_fields=["advantages"])["advantages"].to_padded_tensor(0)
    old, before = batch.batch["old_log_probs"], batch.batch["advantages"]
    expected = (before * (alpha * old.exp() + 1 - alpha) * batch.batch["response_mask"])[:, : found.shape[1]]
    return {
        "largest_error": float((found - expected).abs().max()),
        "kept_share": metrics["advantage_reweighting/kept_share"],
    }


def as_update(trainer: Any, meta: Any) -> Any:
    """A batch in the queue as the trainer's parts take it."""
    from gradloc.adapters.verl09.trainer import QueueUpdate

    return QueueUpdate(trainer, None, meta)


def fetched(overrides: list[str], model_dir: str, stock: bool = False) -> dict[str, Any]:
    """Count the driver's reads of its queue in a healthy step, from the advantages on; and the facts that it learned.

    In the end advantages change behind verl's back, as Advantage Reweighting changes them.
    """
    made = make_trainer(overrides, model_dir, stock=stock)
    trainer, store, reads = made.trainer, made.store, []
    trainer.global_steps = 1
    get = store.get

    def counted(keys: Any, partition_id: Any = None, select_fields: Any = None) -> Any:
        reads.append((len(keys), select_fields))
        return get(keys, partition_id, select_fields)

    store.get = counted
    batch, facts = make_batch(seed=6), []
    with store:
        meta = trainer._compute_advantage(store.add(batch), {})
        turned = type(meta)(keys=meta.keys[::-1], tags=meta.tags[::-1], partition_id=meta.partition_id)
        trainer._update_actor(turned, {})
        num_reads = len(reads) - 1  # the workers' own
        if not stock:
            trainer.gradloc.after_metrics(turned, {}, 1)
            num_reads = len(reads) - 1
            update = as_update(trainer, turned)
            facts.append(update.view().facts)
            update.put(advantages=torch.full_like(update.get("advantages")[0], 5.0))
            facts.append(update.view().facts)
        rows = get(turned.keys, select_fields=["response_mask", "rm_scores", "advantages"]).to_padded_tensor(0)
    return {"num_reads": num_reads, "facts": [vars(each) for each in facts], "rows": dict(rows.items())}


def filtered(overrides: list[str], model_dir: str) -> dict[str, Any]:
    """A batch of 8 groups whose rewards differ the more the later the group, as verl gets it to deal out."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    made = make_trainer(overrides, model_dir)
    batch, metrics = make_batch(), {}
    batch.batch["rm_scores"] = torch.zeros_like(batch.batch["advantages"])
    batch.batch["rm_scores"][::2, 0] = torch.arange(8.0)
    dealt_out: list[Any] = []
    before = batch.batch["advantages"].sum(-1)
    with (
        made.store,
        mock.patch.object(PPOTrainer, "_balance_batch", lambda self, batch, *_, **__: dealt_out.append(batch)),
    ):
        meta = made.store.add(batch)
        places = {key: index for index, key in enumerate(meta.keys)}
        made.trainer._balance_batch(meta, metrics)
        made.trainer.gradloc.analysis.scale_advantages(as_update(made.trainer, dealt_out[0]))
        after = [made.store.rows[key]["advantages"].sum() for key in dealt_out[0].keys]
    return {
        "rows": [places[key] for key in dealt_out[0].keys],
        "in_queue": [places[key] for key in made.store.rows],
        "scales": [float(new / before[places[key]]) for new, key in zip(after, dealt_out[0].keys, strict=True)],
        "metrics": metrics,
    }


def rates(overrides: list[str], model_dir: str) -> tuple[list[float], list[str]]:
    """The learning rate after each of two steps, under a schedule that divides by the number of its steps; and the
    metrics that are a learning rate."""
    made = make_trainer(["algorithm.lopti.enable=true", "algorithm.lopti.quantile=0.5", *overrides], model_dir)
    engine = made.engine
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    found = []
    for step in range(2):
        metrics = made.update(make_batch(seed=step))
        found.append(engine.lr_scheduler.get_last_lr()[0] / engine.lr_scheduler.base_lrs[0])
    return found, sorted(name for name in metrics if name.endswith("/lr"))


def make_side(overrides: list[str], model_dir: str) -> None:
    """Make the trainer's side, which the trainer does first."""
    from gradloc.adapters.verl09.trainer import TrainerSide

    TrainerSide(make_config(overrides, model_dir))


def refusals(cases: list[list[str]], make: Callable[..., Any] = make_side, **given: Any) -> list[str]:
    """Return the sentence that refuses each run before any worker starts."""
    said = []
    for overrides in cases:
        try:
            make(overrides, **given)
            said.append("nothing")
        except (Exception, SystemExit) as error:
            said.append(str(error))
    return said


def train_without_plug_in(model_dir: str) -> None:
    """A run whose environment keeps verl from loading it."""
    import sys

    loaded = {name: module for name, module in sys.modules.items() if name != "gradloc.adapters.verl09.plugin"}
    with mock.patch.dict(sys.modules, loaded, clear=True):
        train(["+gradloc=on"], model_dir)


def with_verl(release: str | None = None) -> str:
    """Return the refusal of this code under another release's name; None: of a method that takes more."""
    from gradloc.adapters.verl09.config import check_verl
    from verl.workers.engine import FSDPEngineWithLMHead

    def optimizer_step(self, closure):
        raise AssertionError

    changed = mock.patch.object(FSDPEngineWithLMHead, "optimizer_step", optimizer_step)
    renamed = mock.patch("verl.__version__", release)
    with renamed if release else changed:
        try:
            check_verl("worker")
        except RuntimeError as error:
            return str(error)
    return "nothing"


def warned_of_a_changed_body() -> str:
    """Return the trainer's warning of a method that takes the same and does something else."""
    from gradloc.adapters.verl09 import config
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def _update_actor(self, batch, metrics):
        return batch

    changed = mock.patch.object(PPOTrainer, "_update_actor", _update_actor)
    with changed, mock.patch.object(config.logger, "warning") as warning:
        config.check_verl("trainer")
    said, *values = warning.call_args.args
    return said % tuple(values)
