# SPDX-License-Identifier: Apache-2.0
"""The conformance suite's harness on verl 0.9: builds a trainer, updates it on a batch and reads it.

Scenarios of `tests.world` speak verl 0.7's names of settings and metrics; they are translated here.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl09 import harness
from tests.adapters.verl09.harness import ACTOR, MODEL
from tests.world.harness import NUM_PROMPT, experts_of, for_verl
from tests.world.models.ulysses import attention_of_verl
from tests.world.oracle import MicroBatch, plain_outputs


def step_class() -> type:
    """The adapter's step, which the search replays."""
    from gradloc.adapters.verl09.step import EngineStep

    return EngineStep


OURS = ("spike_detection=true", "gradloc", "algorithm.", "analysis", "filter")
"""Parts of overrides that ask for ours; without one verl's own trainer is taken."""
BASE = [  # as the actor's harness has it
    f"{ACTOR}.gradloc.enable=null",  # spike_detection decides
    f"{MODEL}.use_remove_padding=false",
    f"{ACTOR}.use_dynamic_bsz=false",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
]
RENAMED = {
    "lora": [f"{MODEL}.lora_rank=4"],
    f"{ACTOR}.ulysses_sequence_parallel_size=2": [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"],
    **{
        f"+{ACTOR}.fsdp_config.mixed_precision={dtypes}": [f"{ACTOR}.fsdp_config.mixed_precision={dtypes}"]
        for dtypes in (harness.FP32.replace("reduce_dtype:fp32", "reduce_dtype:bf16"),)
    },
    **{
        f"{ACTOR}.fsdp_config.dtype={dtype}": [
            f"{ACTOR}.fsdp_config.dtype={dtype}",
            f"{ACTOR}.fsdp_config.mixed_precision={harness.FP32.replace('fp32', short, 1)}",
        ]
        for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
    },
}
BY_RANK = ("actor/", "lopti/")
"""Metrics that come from verl 0.7's workers, a list for each."""


class Trainer(harness.Trainer):
    """One rank's worker and trainer, with what the scenarios use."""

    events: list[dict[str, Any]] = []  # of the last step, of each of its updates

    module = property(lambda self: self.engine.module)
    scaler = property(lambda self: self.engine.scaler)
    optimizer = property(lambda self: self.engine.optimizer)
    grad_clip = property(lambda self: self.engine.optimizer_config.clip_grad)
    hook = property(lambda self: getattr(self.trainer, "gradloc", None))
    driver = property(lambda self: self.hook.spikes)
    config = property(lambda self: self.trainer.config.actor_rollout_ref.actor)
    settings = property(lambda self: self.hook.settings)
    steps_in = clips_in = property(lambda self: (self.engine, "optimizer_step"))

    def update(self, batch: Any) -> dict[str, Any]:
        """One trainer step on the whole batch; returns its metrics and events."""
        self.events = []
        with contextlib.nullcontext() if self.dp_size == dist.get_world_size() else attention_of_verl():
            metrics = super().update(self._as_sampled(batch))
        metrics["actor/grad_norm"] = self.of_workers["grad_norm"]
        found = {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}
        found = {name: [value] if name.startswith(BY_RANK) else value for name, value in found.items()}
        for name in self.reports[0].metrics if self.reports else ():
            found[name] = [list(report.metrics[name]) for report in self.reports]
        return {"metrics": found, "events": self.events}

    def ask(self, ask: Any) -> Any:
        """Keeps the events, of each update in a step."""
        answer = super().ask(ask)
        if ask.__name__.startswith("report"):
            self.events = [*self.events, *(asdict(raw.event) for report in self.reports for raw in report.events)]
        return answer

    # ---- what the analyses' scenarios ask for

    @functools.cached_property
    def actor(self) -> Any:
        """Attributes of verl 0.7's actor that a scenario changes; verl 0.9's engine has none of them."""
        return SimpleNamespace()

    def training_gradient(self, batch: Any) -> tuple[list[Any], float]:
        """Return the gradient that verl's own update leaves in ``.grad``, and the loss."""
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        own, caught, losses, sampled = self.worker.actor.loss_fn, [], [], self._as_sampled(batch)

        def loss_function(**given: Any) -> Any:
            loss, metrics = own(**given)
            losses.append(float(loss.detach()))
            return loss, metrics

        def keep_gradient() -> float:
            caught.append([param.grad for param in self.module.parameters()])
            return 0.0

        with (
            self.store,
            mock.patch.object(self.worker.actor, "loss_fn", loss_function),
            mock.patch.object(self.engine, "optimizer_step", keep_gradient),
        ):
            PPOTrainer._update_actor(self.trainer, self.store.add(sampled), {})
        return caught[0], sum(losses)

    def _rows(self, batch: Any) -> Any:
        """This rank's, as verl's worker gets them."""
        from verl.utils import tensordict_utils as tu

        store = harness.Store()
        data = store.get(store.add(self._as_sampled(batch)).chunk(self.dp_size)[dist.get_rank()].keys)
        tu.assign_non_tensor(data, temperature=1.0, compute_loss=True, calculate_entropy=False)
        return data

    def analyze(self, batch: Any) -> dict[str, Any]:
        """Return the worker's answer to a request for an analysis."""
        from gradloc.adapters.verl09.engine import ASKED_KEY, AnalysisRequest, record_of_actor, watch_actor
        from gradloc.config import GradLocConfig
        from verl.utils import tensordict_utils as tu

        watch_actor(self.worker)
        data = self._rows(batch)
        request = {name: value for name, value in batch.meta_info.items() if name.startswith("gradloc_num")}
        tu.assign_non_tensor(data, **{ASKED_KEY: AnalysisRequest(request, GradLocConfig())})
        self.worker.compute_log_prob(data)
        (record,) = record_of_actor(self.worker).meta_info.values()
        return record

    @contextlib.contextmanager
    def broken_loss(self, broken: Callable) -> Iterator[None]:
        """While this is the loss."""
        loss = partial(broken, **self.worker.actor.loss_fn.keywords)
        with mock.patch.object(self.worker.actor, "loss_fn", loss):
            yield

    def update_by_hand(self, batch: Any, stage: torch.Tensor, name: str) -> None:
        """One update on these tokens, (R, T), of the batch, whose advantages elsewhere are 0."""
        from gradloc.adapters.verl09.trainer import _ACTOR, QueueUpdate, TrainerSide

        batch.batch["lopti_mask"] = stage
        if self.hook is None:
            self.trainer.gradloc = TrainerSide(self.trainer.config)
        with self.store:
            meta = self.store.add(batch)
            own = type(self.trainer).__bases__[-1]._update_actor
            update = QueueUpdate(self.trainer, _ACTOR, meta, partial(own, self.trainer, meta))
            self.hook._update(update, self.hook.spikes, self.hook.stabilizers, name)

    def _as_sampled(self, batch: Any) -> Any:
        """With the actor's own log-probs for the old ones where verl 0.7 would take them for these."""
        if self._is_on_policy(batch):
            batch = copy.deepcopy(batch)
            batch.batch["old_log_probs"] = self.log_probs(batch)
        return batch

    def _is_on_policy(self, batch: Any) -> bool:
        """Whether verl 0.7 would take the log-probs of the forward itself for the old ones: ratios are 1."""
        is_whole = len(batch) == self.config.ppo_mini_batch_size and self.config.ppo_epochs == 1
        return is_whole and getattr(getattr(self.trainer, "gradloc", None), "lopti", None) is None

    def log_probs(self, batch: Any) -> torch.Tensor:
        """The actor's (R, T), as verl 0.9's trainer has the workers compute them before every update."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        store = harness.Store()
        meta = store.add(batch)
        rank = self.engine.get_data_parallel_rank()
        data = store.get(meta.chunk(self.dp_size)[rank].keys)
        half = max(1, len(data) // 2)  # an interleaved pipeline needs two micro-batches
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0)
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=half)
        output = self.worker.compute_log_prob(data)  # a pipeline's last stage has it
        local = None if output is None else no_padding_2_padding(output["log_probs"], data)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (rank, local))
        by_rank = {of: computed for of, computed in everyone if computed is not None}
        found = batch.batch["old_log_probs"].clone()
        rows = iter(found)
        for _, computed in sorted(by_rank.items(), key=lambda pair: pair[0]):
            for values in computed:
                next(rows)[: len(values)] = values
        return found

    @property
    def _loss_function(self) -> Any:
        """Training's: with the clips' weights."""
        from gradloc.adapters.verl09.step import with_token_weights
        from gradloc.stabilize.ratio_clip import TokenWeigher

        own = self.worker.actor.loss_fn
        if self.hook is None or not self.settings.stabilize.weighs_tokens:
            return own
        return with_token_weights(own, TokenWeigher(self.settings.stabilize), dict)

    def micro_batches(self, model: torch.nn.Module, batch: Any) -> Iterator[MicroBatch]:
        """The oracle's: verl's ``ppo_loss`` of a plain model's log-probs."""
        from verl.utils import tensordict_utils as tu

        store, size = harness.Store(), self.config.ppo_micro_batch_size_per_gpu
        parts = [part.keys for part in store.add(batch).chunk(self.dp_size)]
        parts = [keys[: self.config.ppo_mini_batch_size // self.dp_size] for keys in parts]
        told = {
            "dp_size": self.dp_size,
            "global_batch_size": self.config.ppo_mini_batch_size,
            "batch_num_tokens": sum(int(store.rows[key]["response_mask"].sum()) for keys in parts for key in keys),
        }
        for rank, keys in enumerate(parts):
            for index, start in enumerate(range(0, len(keys), size)):
                data = store.get(keys[start : start + size])
                tu.assign_non_tensor(data, **told)
                mask = data["response_mask"].to_padded_tensor(0).bool()
                log_prob, entropy = _plain_forward(model, data, mask.shape[1])
                if self._is_on_policy(batch):
                    lengths = data["responses"].offsets().diff().tolist()
                    old = [row[:length] for row, length in zip(log_prob.detach(), lengths, strict=True)]
                    data["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
                entropy = entropy if self.config.entropy_coeff else None

                def loss(log_prob: torch.Tensor, entropy: torch.Tensor | None, data: Any = data) -> torch.Tensor:
                    output = {"log_probs": log_prob, "entropy": entropy}
                    packed = {name: _packed(value, data) for name, value in output.items() if value is not None}
                    return self._loss_function(model_output=packed, data=data)[0]

                yield MicroBatch(rank, index, mask, log_prob, entropy, loss)


def _plain_forward(model: torch.nn.Module, data: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies (B, T) of the responses, without anything of verl's but what it made of pictures."""
    from verl.utils.model import extract_multi_modal_inputs

    ids = data["input_ids"]
    mask = torch.arange(NUM_PROMPT + width) < ids.offsets().diff()[:, None]
    padded = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, ids.values())
    inputs = extract_multi_modal_inputs(data["multi_modal_inputs"])
    if inputs:  # the picture is one token: all its positions are those of text
        inputs["position_ids"] = torch.arange(mask.shape[1]).expand(4, *mask.shape)
    return plain_outputs(model, padded, mask.long(), width, **inputs)


def _packed(values: torch.Tensor, data: Any) -> torch.Tensor:
    """Response values (B, T) end to end as verl's model output has them: from a prompt's last position on."""
    lengths = data["responses"].offsets().diff().tolist()
    rows = [torch.nn.functional.pad(row[:n], (NUM_PROMPT - 1, 1)) for row, n in zip(values, lengths, strict=True)]
    return torch.cat(rows)


def make_trainer(
    overrides: list[str],
    dump_dir: str,
    dropout: float = 0.0,
    model: torch.nn.Module | None = None,
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """A worker on this world's ranks and the trainer; verl's own where nothing of ours is on."""
    model_dir = f"{dump_dir}-model"
    model = experts_of(overrides) if model is None else model
    if not Path(model_dir, "config.json").exists():
        dist.barrier()  # until every rank has looked
        harness.save_model(model_dir, model)
    renamed = [new for override in for_verl(overrides) for new in RENAMED.get(override, [override])]
    renamed = [override.replace(f"{ACTOR}.grad_clip=", f"{ACTOR}.optim.clip_grad=") for override in renamed]
    given = [f"{ACTOR}.gradloc.dump_dir={dump_dir}", f"+{MODEL}.override_config.attention_dropout={dropout}"]
    is_ours = any(name in override.lower() for override in overrides for name in OURS)
    if not any(override.startswith("+gradloc=") for override in overrides):
        renamed.insert(0, "+gradloc=on")
    return harness.make_trainer(BASE + given + renamed, model_dir, stock=not is_ours, kind=kind)


def targets_of(plants: list[tuple[int, int, float]], batch: Any) -> list[tuple[torch.Tensor, int]]:
    """The sequence of each planted token, without padding, and the place whose logits give its log-prob."""
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    return [(batch.batch["input_ids"][row, : lengths[row]], NUM_PROMPT + position - 1) for row, position, _ in plants]


def without(targets: list[tuple[torch.Tensor, int]], micro_batch: Any, model_output: dict[str, Any]) -> dict[str, Any]:
    """verl's model output with the log-probs at these places of these sequences detached."""
    nested = model_output["log_probs"]
    values = nested.values()
    kept = torch.ones_like(values, dtype=torch.bool)
    for ids, place in targets:
        for row, start in zip(micro_batch["input_ids"].unbind(), nested.offsets()[:-1].tolist(), strict=True):
            if torch.equal(row, ids):
                kept[start + place] = False
    only = torch.where(kept, values, values.detach())
    return {**model_output, "log_probs": torch.nested.nested_tensor_from_jagged(only, nested.offsets())}


@contextlib.contextmanager
def letting_out(plants: list[tuple[int, int, float]], batch: Any) -> Iterator[None]:
    """Make plain training detach the planted tokens in its own forward."""
    from verl.workers.engine import FSDPEngineWithLMHead

    original, targets = FSDPEngineWithLMHead.forward_step, targets_of(plants, batch)

    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        def of_the_others(model_output: dict[str, torch.Tensor], **given: Any) -> Any:
            return loss_function(model_output=without(targets, micro_batch, model_output), **given)

        return original(self, micro_batch, loss_function if forward_only else of_the_others, forward_only)

    with mock.patch.object(FSDPEngineWithLMHead, "forward_step", forward_step):
        yield
