# SPDX-License-Identifier: Apache-2.0
"""verl 0.9's own Megatron engine around a tiny model, without a GPU; runs inside a rank of :mod:`tests.world`.

As in :mod:`tests.adapters.verl09.harness`, all but Ray and TransferQueue is the real thing: Megatron-Core, its
optimizers and schedules, mbridge, verl's engine, worker and trainer.
"""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lab.experiments.verl09 import megatron
from tests.adapters.verl09 import harness
from tests.adapters.verl09.harness import ACTOR, MODEL
from tests.world.harness import digest_of, make_batch, model_config
from tests.world.models.experts import make_experts
from tests.world.oracle import plain_outputs

MEGATRON = f"{ACTOR}.megatron"


def settings_of(model_dir: str) -> list[str]:
    """Settings of a Megatron actor: packed, four rows to a micro-batch."""
    return [
        "model_engine=megatron",
        f"{MODEL}.path={model_dir}",
        f"+{MODEL}.override_config.attn_implementation=eager",
        f"{MEGATRON}.vanilla_mbridge=true",
        f"{MEGATRON}.use_distributed_optimizer=false",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.optim.total_training_steps=10",
        *harness.COMMON,
    ]


def make_config(overrides: list[str], model_dir: str) -> Any:
    """verl's config with these settings and others."""
    return harness.config_of([*settings_of(model_dir), *overrides])


def save_model(folder: str, tied: bool = False, kind: str | None = None) -> None:
    """A random Qwen3 of four layers, or experts of a kind; rank 0 writes."""
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        config = model_config() if kind is None else make_experts(kind).config
        config.num_hidden_layers, config.tie_word_embeddings = 4, tied
        config.layer_types = ["full_attention"] * 4
        config.initializer_range = 0.1
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()


class Trainer(harness.Trainer):
    """One process' worker, and the trainer that every process runs alike."""

    make_config = staticmethod(make_config)

    def weights_hash(self) -> str:
        """sha256 over this process' weights and optimizer state."""
        tensors = [part for chunk in self.engine.module for part in chunk.parameters()]
        tensors += [part for chunk in self.engine.module for part in chunk.module.buffers()]
        for leaf in self.engine.optimizer.chained_optimizers:
            tensors += leaf.get_parameters()
            for param in leaf.get_parameters():
                state = leaf.optimizer.state.get(param, {})
                tensors += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
        with self.engine.eval_mode():  # loads what verl has offloaded
            return digest_of([tensor.detach().clone() for tensor in tensors])  # numpy's could be offloaded no more


_groups: dict[Any, Any] = {}
"""Every process group that was asked for: threads of gloo's outlive a group, and hundreds of them take a core."""


@contextlib.contextmanager
def _groups_kept() -> Iterator[None]:
    """Each process group is made once, and not for each trainer; at most one trainer is in use."""
    of_torch, times_asked = dist.new_group, Counter[Any]()

    def new_group(ranks: Any, *args: Any, backend: Any = None, group_desc: Any = None, **given: Any) -> Any:
        asked = tuple(ranks), backend, group_desc
        times_asked[asked] += 1
        key = *asked, times_asked[asked]
        if key not in _groups:
            _groups[key] = of_torch(ranks, *args, backend=backend, group_desc=group_desc, **given)
        return _groups[key]

    with mock.patch.object(dist, "new_group", new_group), mock.patch.object(dist, "destroy_process_group"):
        yield


@contextlib.contextmanager
def parallel(dtype: str = "float32") -> Iterator[None]:
    """Forget an earlier trainer's layout; a trainer is made within."""
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core import parallel_state

    megatron.install()
    of_bridge = mock.patch.dict(Qwen2Bridge._DIRECT_MAPPING)  # which a tied model writes to
    with _groups_kept(), megatron.engine_in(dtype), of_bridge:
        parallel_state.destroy_model_parallel()
        yield


def train(overrides: list[str], model_dir: str, dtype: str = "float32", **settings: Any) -> dict[str, Any]:
    """Call :func:`harness.train` on this engine."""
    with parallel(dtype):
        return harness.train(overrides, model_dir, kind=Trainer, **settings)


def check(overrides: list[str], model_dir: str) -> str:
    """Return the output of the command for a cluster on this process, which torchrun would have started."""
    from gradloc.adapters.verl09.megatron.check import main

    with parallel(), contextlib.redirect_stdout(io.StringIO()) as said:
        main([*settings_of(model_dir)[1:], *overrides])
    return said.getvalue()


def norm_of_transformers(model_dir: str, dtype: str = "float32") -> float:
    """The gradient norm of the first batch's PPO loss on transformers' model, rounded as Megatron's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model = model.to(getattr(torch, dtype)).float()
    batch = make_batch(seed=1).batch
    log_prob, _ = plain_outputs(model, batch["input_ids"], batch["attention_mask"], batch["responses"].shape[1])
    ratio, advantage = (log_prob - batch["old_log_probs"]).exp(), batch["advantages"]
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
    loss = torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss)
    mask = batch["response_mask"].bool()
    (loss[mask].sum() / mask.sum()).backward()
    return float(torch.stack([param.grad.double().norm() for param in model.parameters()]).norm())


def make_side(overrides: list[str]) -> None:
    """Make the trainer's side, which the trainer does first."""
    from gradloc.adapters.verl09.trainer import TrainerSide

    TrainerSide(make_config(overrides, "model"))


def refusals(cases: list[list[str]]) -> list[str]:
    """Call :func:`..harness.refusals` for this engine."""
    return harness.refusals(cases, make_side)


def differences() -> list[str]:
    """Return how the installed verl and Megatron differ from those that the adapter knows."""
    from gradloc.adapters.verl09.config import TOUCHED
    from gradloc.private_api import differences

    return differences(TOUCHED["megatron"])
