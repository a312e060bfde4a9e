# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's engine that can be run again, by verl's own forward and backward.

The engine lays out a micro-batch without padding: prompts and responses end to end, N positions. A position's log-prob
is that of the next token: a response's first is at its prompt's last position. verl's loss may be wrapped: in weights
on its tokens, and in one stage of Lopti.

Shapes: B rows of the micro-batch, T response positions, N positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDict

from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.activation_offload import ActivationHandler
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from ...analysis.parts import BUCKET_KEY
from ...core.memory_plans import logit_bytes
from ...core.ranks import Ranks
from ...core.step import NUM_TOKENS, ByRow, Details, MicroBatch, Outputs, Recorded, backward_factor
from ...keys import ROW_KEY
from ...private_api import replaced
from ...reweighting.stages import STAGE_MASK_KEY
from ...stabilize.ratio_clip import TokenWeigher
from ..verl_common.losses import WEIGHTS, ActorLoss, AnalysedLoss, changed, setting_of, token_weights


def padded(values: torch.Tensor) -> torch.Tensor:
    """Return values (B, T) that are 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


class Packing:
    """Maps the response tokens (B, T) of verl's TensorDict to the positions (N,) of their log-probs, and back.

    T is ``length``, or where that is None the longest response's.
    """

    def __init__(self, data: Any, device: torch.device, length: int | None = None):
        ends = data["input_ids"].offsets().cpu()[1:]
        lengths = data["responses"].offsets().cpu().diff()
        steps = torch.arange(int(lengths.max()) if length is None else length)
        is_token = steps < lengths.unsqueeze(1)
        places = (ends - lengths - 1).unsqueeze(1) + steps
        tokens = is_token.flatten().nonzero().squeeze(-1)
        self.length, self._num_positions = len(steps), int(ends[-1])
        self._is_token = is_token.to(device)
        self._places = places.clamp(max=self._num_positions - 1).to(device)
        self._tokens, self._positions = tokens.to(device), places.flatten()[tokens].to(device)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of response tokens (B, T) at their positions, (N,); 0 or False elsewhere."""
        kept = values.flatten().index_select(0, self._tokens)
        return values.new_zeros(self._num_positions).index_put((self._positions,), kept)

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of positions (N,) as those of response tokens, (B, T); 0 where there is no token."""
        return torch.where(self._is_token, values[self._places], 0)


def nested_rows(rows: dict[str, list[torch.Tensor]]) -> TensorDict:
    """Return verl's TensorDict of tensors that are given row by row and laid end to end."""
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    return TensorDict(nested, batch_size=len(rows["input_ids"]))


FIELDS = {"log_probs": "log_prob", "entropy": "entropy", "values": "log_prob"}
"""Key of verl's model output -> field of a record; values are a critic's."""

_PER_TOKEN = ("advantages", "old_log_probs", "rollout_log_probs", WEIGHTS, "response_mask")
"""Tensors (B, T) of the batch that the loss reads, by verl's names."""
_DISTILLED = "distillation_loss."
"""Prefix of the settings that are in verl's distillation config, and not in the actor's."""


@dataclass
class EngineMicroBatch(MicroBatch):
    """A micro-batch whose inputs are verl's TensorDict; its record has verl's nested tensors until it is read."""

    @cached_property
    def layout(self) -> Packing:
        return Packing(self.inputs, torch.device(get_device_name()))

    def unpack(self, packed: Mapping[str, torch.Tensor]) -> Recorded:
        """Return the record, (B, T), with these values: padded when it is read, not while nothing spikes."""
        for name, values in packed.items():
            setattr(self.recorded, name, self.layout.unpack(values.to(get_device_name())))
        return self.recorded

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the values (N,) of the record's fields that were not read yet."""
        fields = vars(self.recorded).items()
        return {name: each.values() for name, each in fields if isinstance(each, torch.Tensor) and each.is_nested}


class EngineStep(ActorLoss, ByRow):
    """One mini-batch of verl's ``FSDPEngineWithLMHead``, with :class:`.engine.WatchedFSDP` in front.

    Its loss function is verl's ``ppo_loss`` with the actor's config bound to it.
    """

    trainer_name = "verl 0.9"
    output, old, factor = "log_probs", "old_log_probs", 1.0
    """The model output that the loss uses, its value before the update in the batch, and the loss's factor."""
    micro_batch_class = EngineMicroBatch

    def __init__(self, engine: Any, loss_function: Callable, num_ranks: int):
        scaler = getattr(engine, "scaler", None)  # Megatron has none
        super().__init__(torch.device(get_device_name()), num_ranks, backward_factor(scaler))
        self.engine, self.loss_function = engine, loss_function
        self.config, self.has_ratio_clips = loss_function.keywords["config"], loss_function.func is weighted_loss
        self.dtype = engine._autocast_dtype if hasattr(engine, "_autocast_dtype") else engine.param_dtype

    def record_output(self, model_output: dict[str, torch.Tensor], number: int = -1) -> None:
        """Record the values of the last micro-batch, or of this one, and hook their coefficients; computes nothing."""
        known = {FIELDS[key]: value for key, value in model_output.items() if key in FIELDS and value is not None}
        self.micro_batches[number].recorded.hook(Outputs(**known))

    # ---- what the search may ask

    @property
    def temperature(self) -> float:  # type: ignore[override]
        return float(self.micro_batches[0].inputs["temperature"])

    @property
    def reduces_once(self) -> bool:
        return getattr(self.engine.engine_config, "use_no_sync_for_gradient_accumulation", True)

    def recorded(self, micro_batch: int) -> Recorded:
        batch = self.micro_batches[micro_batch]
        return batch.unpack(batch.packed())

    def rows(self, micro_batch: int) -> list[int]:
        rows = self.micro_batches[micro_batch].inputs.get(ROW_KEY, None)
        if rows is None:
            return []
        return (rows.values() if rows.is_nested else rows).flatten().tolist()

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return padded(self.micro_batches[micro_batch].inputs["response_mask"]).bool().to(get_device_id())

    def details(self, micro_batch: int) -> Details:
        mask, data, config = self.token_mask(micro_batch), self.micro_batches[micro_batch].inputs, self.config
        sizes = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
        sizes["loss_scale_factor"] = config.loss_scale_factor
        weights = token_weights(
            mask, lambda losses: self.factor * agg_loss(losses, mask, config.loss_agg_mode, **sizes)
        )
        # this verl's loss always takes the old log-probs that came with the batch
        return Details(padded(data[self.old]).to(get_device_id()), weights / self.num_ranks)

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        return self.engine._gradient_sync_context(is_last_micro_batch=is_last)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        with resetting_offloading(self.engine) if torch.is_grad_enabled() else without_offloading():
            return self._forward(self._data(micro_batch), self.micro_batches[micro_batch].layout, needs_entropy)

    def forward_rows(self, rows: Sequence[tuple[int, list[int]]]) -> Outputs:
        length = max(self.micro_batches[index].layout.length for index, _ in rows)
        parts = [tu.index_select_tensor_dict(self._data(index), chosen) for index, chosen in rows]
        data = parts[0] if len(parts) == 1 else tu.concat_tensordict(parts)
        with resetting_offloading(self.engine):
            return self._forward(data, Packing(data, torch.device(get_device_name()), length))

    def _forward(self, data: Any, layout: Packing, needs_entropy: bool = False) -> Outputs:
        kept: dict[str, torch.Tensor] = {}
        if needs_entropy:
            data = data.copy()
            tu.assign_non_tensor(data, calculate_entropy=True)

        def keep(model_output: dict[str, torch.Tensor], **_: Any) -> tuple[torch.Tensor, dict]:
            kept.update(model_output)
            return torch.zeros((), device=get_device_name()), {}

        self.engine.plain_forward_step(data, keep, forward_only=not torch.is_grad_enabled())
        return Outputs(
            **{FIELDS[key]: layout.unpack(kept[key].values()) for key in FIELDS if kept.get(key) is not None}
        )

    def forward_bytes(self) -> int:
        if is_fused(self.micro_batches[0].inputs):
            return 0
        module = getattr(self.engine.module, "_fsdp_wrapped_module", self.engine.module)
        ids, first = [each.inputs["input_ids"] for each in self.micro_batches], self.micro_batches[0].inputs
        is_packed = tu.get_non_tensor_data(data=first, key="use_remove_padding", default=True)
        lengths = [nested.offsets().diff() for nested in ids]
        sizes = [int(each.sum() if is_packed else each.max() * len(each)) for each in lengths]
        vocabulary = getattr(module.config.get_text_config(), "vocab_size", 0)
        has_entropy = tu.get_non_tensor_data(data=first, key="calculate_entropy", default=False)
        is_whole = has_entropy and not self.engine.engine_config.entropy_from_logits_with_chunking
        bytes_each = logit_bytes(self.temperature != 1, is_whole)
        return int(max(sizes) * vocabulary * bytes_each) // self.engine.ulysses_sequence_parallel_size

    @property
    def without_kl(self) -> dict[str, Any] | None:
        return None if "distillation_config" in self.loss_function.keywords else super().without_kl

    def setting(self, name: str) -> Any:
        config = self.loss_function.keywords["distillation_config"] if name.startswith(_DISTILLED) else self.config
        return setting_of(config, name)

    def loss_inputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        data = self._data(micro_batch)
        return {} if self.is_value else {name: padded(data[name]) for name in _PER_TOKEN if name in data}

    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        pack, original, data = self.micro_batches[micro_batch].layout.pack, self.loss_function, self._data(micro_batch)
        distilled = {name: value for name, value in settings.items() if name.startswith(_DISTILLED)}
        own = {name: value for name, value in settings.items() if name not in distilled}
        keywords = {**original.keywords, "config": changed(self.config, **own)}
        if distilled:
            keywords["distillation_config"] = changed(original.keywords["distillation_config"], **distilled)
        if tensors:
            data, tensors = data.copy(), dict(tensors)
            if NUM_TOKENS in tensors:
                tu.assign_non_tensor(data, batch_num_tokens=tensors.pop(NUM_TOKENS).item())
            for name, value in tensors.items():
                data[name] = response_to_nested(value, data["response_mask"])
        pairs = zip((self.output, "entropy"), given[:2], strict=True)
        output = {key: pack(value) for key, value in pairs if value is not None}
        group = self.engine.get_data_parallel_group()
        return partial(original.func, *original.args, **keywords)(model_output=output, data=data, dp_group=group)[0]

    # ---- inside

    def _data(self, micro_batch: int) -> Any:
        return self.micro_batches[micro_batch].inputs.to(get_device_id())


class AnalysedEngineStep(EngineStep, AnalysedLoss):
    """This rank's rows of a batch as one mini-batch without an optimizer step, cut into training's micro-batches.

    Rows that only fill up the ranks get no weight.
    """

    def __init__(self, engine: Any, loss_function: Callable, data: Any, ranks: Ranks):
        super().__init__(engine, loss_function, ranks.size)
        settings, config = engine.engine_config, self.config
        is_real, mask = padded(data[BUCKET_KEY]).flatten() >= 0, data["response_mask"]
        data = data.copy()
        data["response_mask"] = response_to_nested(padded(mask) * is_real.unsqueeze(1), mask)
        counts = [float(is_real.sum()), float(padded(mask)[is_real].sum())]
        self._num_rows, self._num_tokens = (max(int(count), 1) for count in ranks.sum(counts))
        sizes = {"batch_num_tokens": self._num_tokens, "global_batch_size": self._num_rows, "sp_size": 1}
        names = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
        has_entropy = bool(config.calculate_entropy or config.entropy_coeff != 0)
        tu.assign_non_tensor(
            data,
            dp_size=ranks.size,
            calculate_entropy=has_entropy,
            **sizes,
            **{name: getattr(settings, name) for name in names},
        )
        size = config.ppo_mini_batch_size * config.rollout_n // engine.get_data_parallel_size()
        mini_batches = [tu.index_select_tensor_dict(data, rows) for rows in torch.arange(len(data)).split(size)]
        group = engine.get_data_parallel_group()
        parts = [part for mini_batch in mini_batches for part in prepare_micro_batches(mini_batch, group)[0]]
        engine.module.train()
        self.record_forwards(map(_real_rows, parts))

    def label(self, name: str, micro_batch: int) -> torch.Tensor:
        """Return a tensor that the driver sent with the rows, (B,) or (B, T)."""
        batch = self.micro_batches[micro_batch]
        values = padded(batch.inputs[name])
        return values.flatten() if name == BUCKET_KEY else values[:, : batch.layout.length]

    def weight_of(self, micro_batch: int, term: str, mode: str) -> tuple[float, bool]:
        mask = self.token_mask(micro_batch)
        if mode == "token-mean":  # verl averages over the tokens of the whole mini-batch
            return int(mask.sum()) / self._num_tokens, True
        return int(mask.any(1).sum()) / self._num_rows, True


def _real_rows(micro_batch: Any) -> Any:
    """Drop rows that only fill up the ranks; keep all if there are no others, since the peers' collectives wait."""
    is_real = (padded(micro_batch[BUCKET_KEY]).flatten() >= 0).nonzero().flatten()
    return tu.index_select_tensor_dict(micro_batch, is_real) if len(is_real) else micro_batch


class EngineCriticStep(EngineStep):
    """One mini-batch of verl's critic; values take the place of log-probs."""

    output, old, factor, is_value = "values", "values", 0.5, True

    @property
    def without_kl(self) -> None:
        """Return None: a critic has no KL term."""

    def forward_bytes(self) -> int:
        return 0


def is_fused(data: Any) -> bool:
    """Return whether verl computes the log-probs of a micro-batch by its fused kernel."""
    return tu.get_non_tensor_data(data=data, key="use_fused_kernels", default=False)


@contextmanager
def without_offloading() -> Iterator[None]:
    """Suspend activation offloading around a forward without a graph, which saves nothing for a backward."""

    def nothing(self: ActivationHandler, module: torch.nn.Module) -> None:
        pass

    def forward(self: ActivationHandler, module: torch.nn.Module, method: Callable, *args: Any, **given: Any) -> Any:
        return method(*args, **given)

    with replaced(ActivationHandler, pre_forward=nothing, post_forward=nothing, forward=forward):
        yield


@contextmanager
def resetting_offloading(engine: Any) -> Iterator[None]:
    """Reset activation offloading before a forward of the search with a graph, and after it if it fails."""
    reset_offloading(engine)
    try:
        yield
    except Exception:
        reset_offloading(engine)
        raise


def reset_offloading(engine: Any) -> None:
    """Reset the handler of an engine that offloads activations, after a forward whose backward never came, as where a
    pass of the search failed."""
    hook = _offloading_hook(engine.module) if engine.model_config.enable_activation_offload else None
    if hook is None:
        return
    if hook.inside_context:
        hook.__exit__()
    handler = hook.offload_handler
    if handler.current_group or handler.tensor_count_current_group:
        handler.__init__(handler.num_offload_group, handler.num_layers, handler.tensor_need_offloading_checker)


def _offloading_hook(module: torch.nn.Module) -> Any:
    """Return the offloading hook that all layers' forwards share; None where there are too few layers for one."""
    for layer in module.modules():
        for cell in getattr(vars(layer).get("forward"), "__closure__", None) or ():
            if isinstance(cell.cell_contents, ActivationHandler):
                return cell.cell_contents._offload_ctx
    return None


_RATIO_FIELDS = ("rollout_log_probs", "response_mask")


def with_token_weights(
    loss_function: partial, weigher: TokenWeigher, note: Callable[[Mapping[str, float]], Any]
) -> partial:
    """Weigh the tokens of verl's loss by the clips on ratios; ``note`` gets their metrics, once a micro-batch."""
    return partial(weighted_loss, loss_function.func, weigher, note, **loss_function.keywords)


def weighted_loss(
    original: Callable,
    weigher: TokenWeigher,
    note: Callable[[Mapping[str, float]], Any],
    *,
    model_output: Mapping[str, torch.Tensor],
    data: Any,
    **given: Any,
) -> tuple[torch.Tensor, dict]:
    """Compute the loss of :func:`with_token_weights`."""
    metrics: dict[str, float] = {}
    inputs = {name: padded(data[name]) for name in _RATIO_FIELDS if name in data.keys()}
    log_prob = no_padding_2_padding(model_output["log_probs"].detach(), data)
    before = padded(data[WEIGHTS]) if WEIGHTS in data.keys() else None
    weights = weigher.token_weights(inputs, log_prob, before, metrics)
    note(metrics)
    data = data.copy()
    data[WEIGHTS] = response_to_nested(weights, data["response_mask"])
    return original(model_output=model_output, data=data, **given)


def within_stage(loss_function: partial) -> partial:
    """Return a loss whose KL and entropy terms are of the stage's tokens alone, over all tokens' number."""
    return partial(_loss_of_stage, loss_function.func, *loss_function.args, **loss_function.keywords)


def _loss_of_stage(
    original: Callable, *args: Any, model_output: Mapping[str, torch.Tensor], data: Any, **given: Any
) -> tuple[torch.Tensor, dict]:
    mask = padded(data[STAGE_MASK_KEY])
    output, entropy = dict(model_output), model_output.get("entropy")
    if entropy is not None:
        packed, is_nested = Packing(data, mask.device).pack(mask), entropy.is_nested
        within = entropy.values() * packed if is_nested else entropy * packed
        output["entropy"] = torch.nested.nested_tensor_from_jagged(within, entropy.offsets()) if is_nested else within
    # verl's loss has the KL of its tokens from a function of this name, and nothing between it and the mean
    penalty = losses.kl_penalty
    with replaced(losses, kl_penalty=lambda *args, **given: penalty(*args, **given) * mask):
        return original(*args, model_output=output, data=data, **given)
