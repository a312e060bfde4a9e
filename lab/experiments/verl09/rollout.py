# SPDX-License-Identifier: Apache-2.0
"""Generate rollouts from the current weights with transformers' `generate`, behind verl 0.9's agent loop.

Loaded by `actor_rollout_ref.model.external_lib` as rollout "hf_cpu". A replica has one server, a Ray actor with a plain
copy of the policy, which answers all received requests in one batch. `rollout.engine_kwargs.hf_cpu.batch` is its size:
then the same prompts get the same answers in every run, though a prompt's answers may be permuted, since verl's agent
loop sends requests as they arrive.
"""

import asyncio

import ray
import torch

from lab.experiments.generation import call_seed, sample
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

base._ROLLOUT_REGISTRY[("hf_cpu", "async")] = f"{__name__}.WeightSender"
RolloutReplicaRegistry.register("hf_cpu", lambda: Replica)

QUIET_S = 0.1
"""Seconds without a request after which a batch of unknown size is complete."""
PATIENCE = 100
"""Factor of that time after which a batch of known size is assumed complete: verl has lost a request."""


def server_name(replica: int) -> str:
    """Return the name of a replica's Ray actor."""
    return f"hf_cpu_server_{replica}"


class Server:
    """A Ray actor that answers requests with a plain copy of the policy.

    Args:
        model_path: the folder with config and tokenizer.
        response_length: maximum number of tokens of a response.
        seed: the run's seed.
        batch: number of requests to answer together; None for those that arrive at about the same time.
    """

    def __init__(self, model_path: str, response_length: int, seed: int, batch: int | None = None):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(model_path)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        self.model.generation_config.eos_token_id = config.eos_token_id
        self.pad = AutoTokenizer.from_pretrained(model_path).pad_token_id
        self.response_length, self.seed, self.batch_size = response_length, seed, batch
        self.global_steps = None
        self.num_calls = 0
        self.waiting: list[tuple] = []
        self.answering = None

    async def load(self, weights: dict, global_steps: int | None) -> None:
        """Load the trainer's full weights; every name must match."""
        self.model.load_state_dict(weights, strict=True)
        if global_steps != self.global_steps:
            self.num_calls = 0
        self.global_steps = global_steps

    async def generate(self, request_id, prompt_ids, sampling_params, **_) -> TokenOutput:
        """Answer verl's request for one response."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, answer))
        if self.answering is None or self.answering.done():
            self.answering = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while self.waiting:
            await self._all_have_come()
            requests, self.waiting = sorted(self.waiting, key=lambda request: request[0]), []
            try:
                answers = self._sample([prompt for prompt, _, _ in requests], requests[0][1])
            except Exception as error:
                answers = [error] * len(requests)
            for (_, _, future), answer in zip(requests, answers, strict=True):
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _all_have_come(self) -> None:
        quiet, patience = 0, PATIENCE if self.batch_size else 1
        while quiet < patience and len(self.waiting) < (self.batch_size or float("inf")):
            number = len(self.waiting)
            await asyncio.sleep(QUIET_S)
            quiet = quiet + 1 if len(self.waiting) == number else 0

    def _sample(self, prompts: list[list[int]], asked: dict) -> list[TokenOutput]:
        # per step, so that additional requests of an analysis do not change later steps
        seed = call_seed(self.seed, self.step, self.num_calls)
        self.num_calls += 1
        answers = sample(self.model, prompts, self._params(asked), seed)
        step = {"global_steps": self.global_steps}
        return [
            TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed", extra_fields=step)
            for tokens, log_probs in answers
        ]

    @property
    def step(self) -> int:
        """The training step, counted from 1, that the weights are for."""
        return (self.global_steps or 0) + 1

    def _params(self, asked: dict) -> dict:
        return {
            "temperature": asked["temperature"] or 1.0,
            "top_p": asked["top_p"],
            "do_sample": asked["temperature"] > 0,
            "max_new_tokens": self.response_length,
            "pad_token_id": self.pad,
        }

    async def nothing(self, **_) -> None:
        """Do nothing: on a CPU no memory is released."""

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    """Start the server."""

    server = Server

    async def init_standalone(self):
        """Start the server on processors; verl's own method requests GPUs."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"rollout_standalone_{self.replica_rank}"
        self.resource_pool = RayResourcePool([self.world_size], use_gpu=False, name_prefix=name, max_colocate_count=2)
        group = RayWorkerGroup(
            self.resource_pool, self.get_ray_class_with_init_args(), bin_pack=False, name_prefix=name, use_gpu=False
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self):
        path, config = self.model_config["path"], self.config
        make = ray.remote(num_cpus=0)(self.server).options(name=server_name(self.replica_rank))
        given = config.engine_kwargs.get("hf_cpu", {})
        server = make.remote(path, config.response_length, config.seed, **given)
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(self.replica_rank)


class WeightSender(base.BaseRollout):
    """Run in each FSDP worker; the first worker of a replica sends the weights to its server."""

    async def resume(self, tags):
        """Do nothing: on a CPU no memory is released."""

    async def release(self):
        """Do nothing: on a CPU no memory is released."""

    async def update_weights(self, weights, global_steps=None, **_):
        """Send the weights, which all workers of the replica gather; a checkpoint engine yields them one by one."""
        if hasattr(weights, "__aiter__"):
            gathered = {name: tensor async for name, tensor in weights}
        else:
            gathered = {name: tensor.detach().clone() for name, tensor in weights}
        replica, place = divmod(torch.distributed.get_rank(), self.config.tensor_model_parallel_size)
        if place == 0:
            server = ray.get_actor(server_name(replica))
            await server.load.remote(gathered, global_steps)
