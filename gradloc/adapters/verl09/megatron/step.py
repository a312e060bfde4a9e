# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's Megatron engine that can be run again: every pass is Megatron's own schedule.

Only a pipeline's last stage has log-probs: there they are recorded and detached. A search begins with the last stage
sending the others what it recorded, so that every process of a data-parallel rank has the same.

Shapes: B rows of the micro-batch, T response positions, N positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config

from verl.models.mcore import model_forward_fused
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.pipeline_parallel import make_batch_generator
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

from ....core.forward_state import RngState
from ....core.fp32_head import precise_linear
from ....core.memory_plans import logit_bytes
from ....core.ranks import LostRank
from ....core.step import Outputs, Recorded, Scheduled
from ....private_api import replaced
from ....watch.megatron import without_wrappers
from ..step import FIELDS, EngineStep, is_fused

_NUMBER = "gradloc_micro_batch"
_ROWS_PART = 512  # positions whose logits are held at a time
_PLACE = "gradloc_place"
"""Keys of a micro-batch's number in the step, and of its place in a pass."""

_Pulls = Sequence[tuple[int, Outputs | None]]
"""Micro-batches of a pass with their coefficients; None in a pass without a backward."""


class MegatronStep(EngineStep, Scheduled):
    """One mini-batch of verl's ``MegatronEngineWithLMHead``."""

    def __init__(self, engine: Any, loss_function: Callable, num_ranks: int):
        super().__init__(engine, loss_function, num_ranks)
        self.num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._is_shared = self.num_stages == 1
        self._pass: _Pulls | None = None
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._failure: Exception | None = None
        self._own_num_tokens: torch.Tensor | None = None
        self._num_tokens: torch.Tensor | None = None
        """Divisor of the gradient with ``calculate_per_token_loss``: this process' tokens, and all processes'."""
        chunks = map(without_wrappers, engine.module)
        self._routers = [value for chunk in chunks for name, value in chunk.named_buffers() if ".router." in name]
        """Buffers of the routers' load balancing, which each schedule updates at its end."""
        self._routers_before: list[torch.Tensor] = []

    # ---- while Megatron runs a schedule, training's or that of a pass

    @property
    def is_replaying(self) -> bool:
        """True while the running schedule is a pass of the search, and not training's."""
        return self._pass is not None

    def before_forward(self, micro_batch: Any) -> None:
        """Save the random state before training's forward of a model chunk, or restore it before a replay."""
        number = tu.get_non_tensor_data(micro_batch, key=_NUMBER, default=None)
        if self.is_replaying:
            self.micro_batches[number].recorded.rng.restore()
        elif number is None:
            if not self.num_micro_batches:
                self._routers_before = [value.clone() for value in self._routers]
            tu.assign_non_tensor(micro_batch, **{_NUMBER: self.num_micro_batches})
            super().before_forward(micro_batch)
        else:  # another chunk's
            self.micro_batches[number].recorded.rng = RngState(self.device)

    def after_output(self, output: dict[str, torch.Tensor], data: Any) -> dict[str, torch.Tensor]:
        """Record training's values on the last stage, or keep those of a forward without a graph."""
        if self._pass is None:
            self.record_output(output, tu.get_non_tensor_data(data, key=_NUMBER, default=-1))
            return output
        if not torch.is_grad_enabled():
            place = tu.get_non_tensor_data(data, key=_PLACE, default=-1)
            self._outputs[place] = {key: output[key].values() for key in FIELDS if output.get(key) is not None}
        return output

    def _pulled(self, model_output: dict[str, torch.Tensor], data: Any, **_: Any) -> tuple[torch.Tensor, dict]:
        """Replace the loss in a pass: its backward delivers the pass' coefficients, whatever the schedule's factor."""
        assert self._pass is not None
        number, pull = self._pass[tu.get_non_tensor_data(data, key=_PLACE, default=-1)]
        total = torch.zeros((), device=self.device)
        for key, name in FIELDS.items():
            coefficient = getattr(pull, name)
            if model_output.get(key) is None or coefficient is None:
                continue
            values, packed = model_output[key].values(), self.micro_batches[number].layout.pack(coefficient)
            values.register_hook(lambda grad, packed=packed: packed.to(grad.dtype))
            total = total + values.sum()
        return total, {}

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """Note the divisor of training's gradient in a schedule, and have a pass of the search divide by it."""
        config = get_model_config(self.engine.module[0])
        original = config.finalize_model_grads_func

        def finalize(model: Any, num_tokens: torch.Tensor | None, **given: Any) -> None:
            if num_tokens is not None and not self.is_replaying:
                self._own_num_tokens, self._num_tokens = num_tokens.clone(), num_tokens
            elif num_tokens is not None:
                num_tokens = self._own_num_tokens.clone()
            original(model, num_tokens, **given)  # which sums the numbers over all ranks

        with replaced(config, finalize_model_grads_func=finalize):
            yield

    def failed(self, error: Exception) -> None:
        """Note a failure in the loss of a pass, which runs to its end so that no stage waits for another."""
        self._failure = self._failure or error

    # ---- what the search may ask

    @property
    def reduces_once(self) -> bool:
        return True

    @property
    def weight(self) -> float:
        return self._factor / self.num_ranks

    def distribute_records(self) -> None:
        if self._is_shared:
            return
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        synced = self.engine._watch.ranks.run_local_synced
        batches = self.micro_batches
        sent = synced(lambda: [{name: value.cpu() for name, value in each.packed().items()} for each in batches])
        dist.broadcast_object_list(sent, src=source, group=_stages())
        synced(lambda: [each.unpack(values) for each, values in zip(batches, sent, strict=True)])
        self._is_shared = True

    def recorded(self, micro_batch: int) -> Recorded:
        if not self._is_shared and not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            unknown = Recorded(self.micro_batches[micro_batch].recorded.rng)  # the last stage knows
            unknown.log_prob = torch.zeros(self.token_mask(micro_batch).shape)
            return unknown
        return super().recorded(micro_batch)

    @property
    def _factor(self) -> float:
        """Factor from a hooked coefficient to one of the mean over data-parallel ranks. Megatron multiplies the loss by
        the number of context-parallel ranks, or divides the gradients' sum by the number of tokens."""
        if self._num_tokens is not None:
            return self.num_ranks / int(self._num_tokens)
        return 1.0 / parallel_state.get_context_parallel_world_size()

    @property
    def loss_factor(self) -> float:
        if self._num_tokens is None:
            return super().loss_factor
        # not the number that the gradient is divided by: that is a sum of halves (of context-parallel ranks), rounded
        data = self.micro_batches[0].inputs
        return tu.get_non_tensor_data(data, key="routed_num_tokens", default=int(self._num_tokens)) / self.num_ranks

    def forward_bytes(self) -> int:
        if is_fused(self.micro_batches[0].inputs):
            return 0
        ids = [each.inputs["input_ids"] for each in self.micro_batches]
        vocabulary = self.engine.model_config.hf_config.get_text_config().vocab_size
        each = logit_bytes(True, True)
        size = max(int(nested.offsets()[-1]) for nested in ids)
        processes = parallel_state.get_tensor_and_context_parallel_world_size()
        return int(size * vocabulary * each) // processes

    def run_pass(self, pulls: _Pulls) -> None:
        self.engine.optimizer_zero_grad()
        self._run(pulls, forward_only=False)
        self._end()
        self.engine.optimizer.prepare_grads()

    # ---- inside

    @torch.no_grad()
    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """Run the forward without a graph; passes with one run by :meth:`run_pass`."""
        data = self._data(micro_batch)
        if needs_entropy:
            data = data.copy()
            tu.assign_non_tensor(data, calculate_entropy=True)
        with _precise_readout(self.engine):
            self._run([(micro_batch, None)], forward_only=True, data=data)
        has_entropy = tu.get_non_tensor_data(data, key="calculate_entropy", default=False)
        keys = [self.output, *(["entropy"] if has_entropy else [])]
        values = self._read(micro_batch, keys)
        if self.num_stages > 1:
            with self._in_stages():
                source = parallel_state.get_pipeline_model_parallel_last_rank()
                dist.broadcast(values, src=source, group=_stages())
        self._end()
        return Outputs(*values.unbind())

    def _read(self, micro_batch: int, keys: list[str]) -> torch.Tensor:
        """Return the pass' outputs, (keys, B, T): zeros where this is not the last stage, or where it failed."""
        output, self._outputs = self._outputs.get(0, {}), {}
        try:
            if output:
                return torch.stack([self.micro_batches[micro_batch].layout.unpack(output[key]).float() for key in keys])
        except Exception as error:  # the other stages wait for what is read
            self.failed(error)
        shape = self.token_mask(micro_batch).shape
        return torch.zeros(len(keys), *shape, device=self.device)

    def _run(self, pulls: _Pulls, forward_only: bool, data: Any = None) -> None:
        """Run Megatron's schedule over these micro-batches.

        The interleaved schedule takes a fixed number at a time: missing micro-batches run with coefficients of 0.
        """
        engine, chosen = self.engine, list(pulls)
        at_once = engine.tf_config.microbatch_group_size_per_vp_stage if len(engine.module) > 1 else 1
        nothing = Outputs(torch.zeros_like(self.recorded(chosen[0][0]).log_prob))
        chosen += [(chosen[0][0], nothing)] * (-len(chosen) % at_once)
        batches = []
        for place, (number, _) in enumerate(chosen):
            batch = (self.micro_batches[number].inputs if data is None else data).copy()
            tu.assign_non_tensor(batch, num_micro_batch=len(chosen), **{_NUMBER: number, _PLACE: place})
            batches.append(batch)
        loss_function = None if forward_only else self._pulled
        postprocess = partial(
            engine.postprocess_micro_batch_func, forward_only=forward_only, loss_function=loss_function
        )
        self._pass, self._failure = chosen, None
        try:
            with self._in_stages(), self._routers_as_in_step(len(batches)), self.dividing():
                get_forward_backward_func()(
                    forward_step_func=partial(
                        engine.forward_step,
                        logits_processor_func=None if forward_only else self.loss_function,
                        postprocess_micro_batch_func=postprocess,
                    ),
                    data_iterator=make_batch_generator(batches, vpp_size=len(engine.module)),
                    model=engine.module,
                    num_microbatches=len(batches),
                    seq_length=1,  # the shapes come with what is sent
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
        finally:
            self._pass = None

    @contextmanager
    def _routers_as_in_step(self, num_micro_batches: int) -> Iterator[None]:
        """Make routers' losses in a pass those of the step, and give routers the biases of training's forwards.

        Megatron adds their losses by itself in the backward, as a mean over the micro-batches of the pass.
        """
        original, factor = MoEAuxLossAutoScaler.set_loss_scale, num_micro_batches / self.num_micro_batches
        if self._num_tokens is not None:
            factor = 1.0
        present = [value.clone() for value in self._routers]
        _copy(self._routers_before, self._routers)
        try:
            with replaced(MoEAuxLossAutoScaler, set_loss_scale=staticmethod(lambda scale: original(scale * factor))):
                yield
        finally:
            _copy(present, self._routers)

    def _end(self) -> None:
        """Raise the failure of a pass, once no stage waits for another."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _in_stages(self) -> Iterator[None]:
        """Turn a failure into :class:`LostRank` where stages wait for each other: a pipeline cannot recover."""
        try:
            yield
        except Exception as error:
            if self.num_stages == 1:
                raise
            raise LostRank("a stage of the pipeline failed in a forward or backward of the search") from error


def _stages() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    for value, copied in zip(source, target, strict=True):
        copied.copy_(value)


@contextmanager
def _precise_readout(engine: Any) -> Iterator[None]:
    """Compute log-probs in float32 from the last hidden state: rounded ones would hide small moves."""
    head = getattr(without_wrappers(engine.module[-1]), "output_layer", None)
    if head is None or engine.param_dtype == torch.float32:
        yield
        return

    def read_out(hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        if head.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        return precise_linear(hidden, head.weight if weight is None else weight, head.bias), None

    with replaced(head, forward=read_out), replaced(model_forward_fused, linear_cross_entropy=_fused_log_probs):
        yield


def _fused_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace verl's fused kernel: return log-probs and entropies, float32 in the labels' shape, a few positions at a
    time. ``weight`` is this process' part of the vocabulary."""
    log_probs, entropies = [], []
    rows = hidden.reshape(-1, hidden.shape[-1]).split(_ROWS_PART)
    for part, chosen in zip(rows, labels.reshape(-1).split(_ROWS_PART), strict=True):
        logits = precise_linear(part, weight, None) / temperature
        entropies.append(vocab_parallel_entropy(logits))
        log_probs.append(vocab_parallel_log_probs_from_logits(logits, chosen))
    return torch.cat(log_probs).view(labels.shape), torch.cat(entropies).view(labels.shape)
