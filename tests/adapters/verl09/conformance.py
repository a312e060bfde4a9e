# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's worker and trainer in the conformance suite; scenarios speak verl 0.7's names of settings and metrics."""

import contextlib
import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.adapters.verl09 import harness
from tests.adapters.verl09.features import Features
from tests.adapters.verl09.harness import ACTOR, MODEL
from tests.world.harness import NUM_PROMPT, HeldTrainer, LetOut, as_lists, experts_of, for_verl
from tests.world.models.ulysses import attention_of_verl
from tests.world.models.vision import pictures_of

STEP = "adapters.verl09.step.EngineStep"
OURS = ("spike_detection=true", "gradloc", "algorithm.", "analysis", "filter")
"""Parts of overrides that ask for ours; without one verl's own trainer is taken."""
BASE = [  # as the actor's harness has it
    f"{ACTOR}.gradloc.enable=null",  # spike_detection decides
    f"{MODEL}.use_remove_padding=false",
    f"{ACTOR}.use_dynamic_bsz=false",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
]
RENAMED = {
    "lora": f"{MODEL}.lora_rank=4",
    f"{ACTOR}.grad_clip=": f"{ACTOR}.optim.clip_grad=",
    f"{ACTOR}.ulysses_sequence_parallel_size=": f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=",
    f"+{ACTOR}.fsdp_config.mixed_precision=": f"{ACTOR}.fsdp_config.mixed_precision=",
}
HALF = {"bfloat16": "bf16", "float16": "fp16"}


class Trainer(Features, HeldTrainer, harness.Trainer):
    """One rank's worker and trainer, with what the scenarios use."""

    has_driver = is_sharded = True
    module = property(lambda self: self.engine.module)
    scaler = property(lambda self: self.engine.scaler)
    optimizer = property(lambda self: self.engine.optimizer)
    hook = property(lambda self: getattr(self.trainer, "gradloc", None))
    driver = property(lambda self: self.hook.spikes)
    config = property(lambda self: self.trainer.config.actor_rollout_ref.actor)
    steps_in = clips_in = property(lambda self: (self.engine, "optimizer_step"))
    rows_each = property(lambda self: self.config.ppo_micro_batch_size_per_gpu)
    rows_per_step = property(lambda self: self.config.ppo_mini_batch_size // self.dp_size)
    has_entropy = property(lambda self: bool(self.config.entropy_coeff))
    pictures = staticmethod(pictures_of)

    def run(self, batch: Any) -> dict[str, Any]:
        with contextlib.nullcontext() if self.dp_size == dist.get_world_size() else attention_of_verl():
            metrics = harness.Trainer.update(self, self.as_sampled(batch))
        metrics["actor/grad_norm"] = self.of_workers["grad_norm"]
        names = self.reports[0].metrics if self.reports else ()
        return as_lists(metrics) | {name: [list(each.metrics[name]) for each in self.reports] for name in names}

    def loss(self, batch: Any, rows: slice, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        from verl.utils import tensordict_utils as tu

        if self.is_on_policy(batch):
            batch = copy.deepcopy(batch)
            batch.batch["old_log_probs"][rows] = log_prob.detach()
        store, mask = harness.Store(), batch.batch["response_mask"]
        data = store.get(store.add(batch).keys[rows])
        num_tokens = sum(int(mask[each].sum()) for _, _, each in self.deal(batch))
        size, lengths = self.config.ppo_mini_batch_size, data["responses"].offsets().diff().tolist()
        tu.assign_non_tensor(data, dp_size=self.dp_size, global_batch_size=size, batch_num_tokens=num_tokens)

        def packed(values: torch.Tensor) -> torch.Tensor:  # as verl's output, from a prompt's last position on
            pairs = zip(values, lengths, strict=True)
            return torch.cat([torch.nn.functional.pad(row[:n], (NUM_PROMPT - 1, 1)) for row, n in pairs])

        output = {"log_probs": packed(log_prob)} | ({} if entropy is None else {"entropy": packed(entropy)})
        return self.loss_function(model_output=output, data=data)[0]

    def letting_out(self, let_out: LetOut) -> contextlib.AbstractContextManager[Any]:
        own = self.worker.actor.loss_fn

        def other_loss(model_output: dict[str, torch.Tensor], data: Any, **given: Any) -> Any:
            nested = model_output["log_probs"]
            values, offsets = nested.values(), nested.offsets()
            kept = torch.ones_like(values, dtype=torch.bool)
            for row, position in (~let_out.kept(data["responses"].to_padded_tensor(0))).nonzero().tolist():
                kept[offsets[row] + NUM_PROMPT - 1 + position] = False
            only = torch.where(kept, values, values.detach())
            output = {**model_output, "log_probs": torch.nested.nested_tensor_from_jagged(only, offsets)}
            return own(model_output=output, data=data, **given)

        return mock.patch.object(self.worker.actor, "loss_fn", other_loss)


def make_trainer(
    overrides: list[str], dump_dir: str, dropout: float = 0.0, model: Any = None, kind: type[Trainer] = Trainer
) -> Trainer:
    """Make a worker on this world's ranks and the trainer, verl's own where nothing of ours is on."""
    model_dir = f"{dump_dir}-model"
    model = experts_of(overrides) if model is None else model
    if not Path(model_dir, "config.json").exists():
        dist.barrier()  # until every rank has looked
        harness.save_model(model_dir, model)
    renamed = for_verl(overrides)
    for theirs, name in RENAMED.items():
        renamed = [name + each.removeprefix(theirs) if each.startswith(theirs) else each for each in renamed]
    for dtype in {*HALF} & {each.removeprefix(f"{ACTOR}.fsdp_config.dtype=") for each in overrides}:
        renamed.append(f"{ACTOR}.fsdp_config.mixed_precision={harness.FP32.replace('fp32', HALF[dtype], 1)}")
    given = [f"{ACTOR}.gradloc.dump_dir={dump_dir}", f"+{MODEL}.override_config.attention_dropout={dropout}"]
    is_ours = any(name in override.lower() for override in overrides for name in OURS)
    if not any(override.startswith("+gradloc=") for override in overrides):
        renamed.insert(0, "+gradloc=on")
    return harness.make_trainer(BASE + given + renamed, model_dir, stock=not is_ours, kind=kind)
