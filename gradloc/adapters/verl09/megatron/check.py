# SPDX-License-Identifier: Apache-2.0
"""Check that GradLoc measures right with this Megatron on these GPUs, by steps of verl's engine on made-up sequences.

    torchrun --nproc_per_node=8 -m gradloc.adapters.verl09.megatron.check OVERRIDE...

The overrides are a run's own, of its model and layout. No Ray and no rollout take part; no weights are saved.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hydra
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.distributed import initialize_global_process_group
from verl.workers.engine_workers import ActorRolloutRefWorker

from ....config import settings_in
from ....core.probe import Prober
from ....keys import POLICY_KEY
from ....loop.messages import Policy
from ....private_api import replaced
from ....record.origin import version_of
from ....watch.megatron import MegatronSpace, leaves_of
from ..engine import watch_actor
from ..step import nested_rows

_ACTOR = "actor_rollout_ref.actor"
_OWN = (
    f"{_ACTOR}.use_dynamic_bsz=false",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{_ACTOR}.policy_loss.loss_mode=gpg",  # it needs no old log-probs
    f"{_ACTOR}.use_kl_loss=false",
    f"{_ACTOR}.megatron.param_offload=false",  # no rollout needs the memory, and the weights are read between updates
    f"{_ACTOR}.megatron.optimizer_offload=false",
    f"{_ACTOR}.gradloc.evidence.bundle=off",
)
_ROW, _POSITION, _ADVANTAGE = 0, 5, 1e4
_NUM_PROMPT, _NUM_RESPONSE = 16, 32


class Check:
    """Runs the check on verl's worker of this process; ``overrides`` are of verl's ``ppo_trainer`` config."""

    def __init__(self, overrides: Sequence[str]):
        asked = [f"{_ACTOR}.gradloc.dump_dir={tempfile.gettempdir()}/gradloc-check", *overrides, *_OWN]
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", ["model_engine=megatron", "+gradloc=on", *asked])
        self.settings = settings_in(config)
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        self.worker.init_model()
        watch_actor(self.worker)
        self.engine = self.worker.actor.engine
        self.engine.lr_scheduler_step = lambda: 0.0  # each step has the same
        self.space = MegatronSpace(self.engine.module, self.engine.optimizer)
        self.num_rows = 2 * self.worker.config.actor.megatron.pipeline_model_parallel_size
        self.num_updates, self.sum_error = 0, 0.0
        self.event: Any = None
        """Event of the step that is looked into, on the first process."""

    def run(self) -> dict[str, bool]:
        """Return each claim and whether it holds; the same on all processes."""
        self._update(1.0, "observe", float("inf"))
        limit = 10 * self.engine._watch.report().norms[0]
        start = self._state()
        with replaced(self.engine, optimizer_step=self._add_up_halves):
            self._update(1.0, "observe", float("inf"))
        plain, again = self._after(start, _ADVANTAGE), self._after(start, _ADVANTAGE)
        watched = self._after(start, _ADVANTAGE, "observe", limit)
        masked = self._after(start, _ADVANTAGE, "mask", limit)
        without = self._after(start, 0.0)
        return {
            "the same step again is the same": self._are_same(plain, again),
            "a step that was looked into is the same": self._are_same(plain, watched),
            "mask is training without the token": self._are_same(masked, without),
            "mask is another step": not self._are_same(plain, masked),
        }

    def _after(self, start: list[torch.Tensor], *how: Any) -> list[torch.Tensor]:
        """Return the state after an update from the common start."""
        with torch.no_grad():
            for now, was in zip(self._tensors(), start, strict=True):
                now.copy_(was)
        self.space.publish()
        self._update(*how)
        return self._state()

    def _update(self, advantage: float, mode: str | None = None, limit: float = 0.0) -> None:
        """Run one update of verl's; with a mode it is watched, and looked into where its norm is over the limit."""
        data = self._sequences(advantage)
        size = self.engine.get_data_parallel_size() * self.num_rows
        self.num_updates += 1
        self.engine._watch = None
        if mode is not None:
            settings = replace(self.settings, action=replace(self.settings.action, mode=mode))
            rule = [size * _NUM_RESPONSE], [limit], [None]
            policy = Policy(self.num_updates, "fixed", *rule, 1, update=self.num_updates, settings=settings)
            tu.assign_non_tensor(data, **{POLICY_KEY: policy})
        flags = ("calculate_entropy", "distillation_use_topk", "distillation_only")
        tu.assign_non_tensor(data, **dict.fromkeys(flags, False), global_batch_size=size, mini_batch_size=size)
        tu.assign_non_tensor(data, temperature=1.0, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
        self.worker.update_actor(data)
        if mode == "observe" and (events := self.engine._watch.report().events):
            self.event = events[0].event

    def _add_up_halves(self) -> float:
        """Compare the gradient of all tokens with the sum of those of even and odd tokens, in place of a step."""
        prober = Prober(self.engine._watch.step, self.space, self.engine._watch.ranks)

        def gradient(*parities: int) -> list[Any]:
            def chosen(index: int) -> torch.Tensor:
                mask = prober.step.token_mask(index)
                parity = torch.arange(mask.shape[-1], device=mask.device) % 2
                return mask & torch.isin(parity, torch.tensor(parities, device=mask.device))

            prober.compute((index, chosen(index)) for index in range(prober.step.num_micro_batches))
            return self.space.take()

        whole, even, odd = gradient(0, 1), gradient(0), gradient(1)
        self.space.put(even)
        prober.add(odd)
        prober.add(whole, alpha=-1.0)
        self.sum_error = self.space.norm() / self.space.norm(whole)
        return 0.0

    def _sequences(self, advantage: float) -> TensorDict:
        """Return a data-parallel rank's rows, the same each time, with this advantage at the first rank's one token."""
        rank, size, length = self.engine.get_data_parallel_rank(), self.num_rows, _NUM_PROMPT + _NUM_RESPONSE
        vocabulary = self.engine.model_config.hf_config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(rank)
        ids = [torch.randint(vocabulary, (length,), generator=draw) for _ in range(size)]
        advantages = torch.randn(size, _NUM_RESPONSE, generator=draw)
        if rank == 0:
            advantages[_ROW, _POSITION] = advantage
        masks = [torch.ones(_NUM_RESPONSE, dtype=torch.long)] * size
        return nested_rows(
            {
                "prompts": [row[:_NUM_PROMPT] for row in ids],
                "responses": [row[_NUM_PROMPT:] for row in ids],
                "input_ids": ids,
                "position_ids": [torch.arange(length)] * size,
                "response_mask": masks,
                "loss_mask": masks,
                "old_log_probs": [torch.zeros(_NUM_RESPONSE)] * size,
                "advantages": list(advantages),
            }
        )

    def _tensors(self) -> list[torch.Tensor]:
        """Return weights and moments of this process, and its routers' buffers."""
        states = [state for leaf in leaves_of(self.engine.optimizer) for state in leaf.optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        buffers = [value for chunk in self.engine.module for value in chunk.module.buffers()]
        return [*(param.data for param in self.space.params), *moments, *buffers]

    def _state(self) -> list[torch.Tensor]:
        return [tensor.detach().cpu().clone() for tensor in self._tensors()]

    def _are_same(self, left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        by_process: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_process, all(map(torch.equal, left, right)))
        return all(by_process)


def block(check: Check, claims: dict[str, bool]) -> str:
    """Return the report to send, on the first process."""
    packages = ("verl", "megatron-core", "megatron-bridge", "transformer-engine", "torch")
    megatron, event = check.worker.config.actor.megatron, check.event
    sizes = [f"{name.partition('_')[0]} {megatron[name]}" for name in megatron if name.endswith("_parallel_size")]
    device = get_torch_device().get_device_name() if get_device_name() == "cuda" else "CPU"
    named = [(culprit.rank, culprit.positions) for culprit in event.culprits] if event else []
    verdict = event.certificate.verdict if event else "no event"
    lines = [
        ", ".join(f"{name} {version_of(name) or 'none'}" for name in packages),
        f"{dist.get_world_size()} x {device}; {', '.join(sizes)}; {check.engine.param_dtype}",
        f"two halves of the tokens add up to the gradient within {check.sum_error:.1e}",
        f"one token planted: {len(named)} named, at (rank, positions) {named}: {verdict}",
        f"closure: {event.shares.closure:.4f}" if event and event.shares else "closure: none",
        *(f"{claim}: {'yes' if holds else 'NO'}" for claim, holds in claims.items()),
    ]
    return "\n  ".join(["gradloc check, to be sent as it is:", *lines])


def main(overrides: Sequence[str]) -> None:
    """Run the check and print the block, with overrides of verl's ``ppo_trainer`` config."""
    if not dist.is_initialized():
        initialize_global_process_group()
    check = Check(overrides)
    claims = check.run()
    if dist.get_rank() == 0:
        print(block(check, claims), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
