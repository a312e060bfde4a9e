# SPDX-License-Identifier: Apache-2.0
"""verl's engine as the gradient analyses see it.

The engine's rows have no padding, an analysis' have; each carries its number, by which the engine's row is found again.

Shapes: R rows on this rank, B rows of a micro-batch, T response positions of this rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from ....analysis.actor import BUCKET_KEY, MicroBatch, Rows
from ....analysis.measure import measure
from ....analysis.quartiles.probe import QUARTILE_KEY, SAMPLE_KEY
from ....core.ranks import Ranks
from ....core.step import RngState
from ...verl_common.analyses import VerlAnalysed
from ...verl_common.losses import changed, is_of_micro_batch
from ...verl_common.precise import readout_of
from ...verl_common.reports import answer
from ...verl_common.watch import device_of
from ..packed import Layout, pack, padded
from ..step import is_fused

ASKED_KEY = "gradloc_analysis"
"""Meta info of a batch: what is :class:`Asked`."""
_INDEX_KEY = "gradloc_analysis_row"
_WIDTH_KEY = "gradloc_analysis_width"
"""int (B,): response positions of the row's micro-batch, by which verl divides one of its means."""
_DENSE = (BUCKET_KEY, QUARTILE_KEY, SAMPLE_KEY)


@dataclass(frozen=True)
class Asked:
    """What the trainer asks every rank for."""

    request: dict[str, Any]
    """See :func:`~....analysis.measure.measure`."""
    settings: Any
    """Those that hold."""


def analyze(
    engine: Any, data: Any, loss_function: Any, clip: Callable[[], torch.Tensor], request: dict[str, Any]
) -> dict[str, Any]:
    """Split the gradient of a batch: see :func:`~....analysis.measure.measure`, and below."""
    adapted = AnalysisEngine(engine, data, loss_function, clip)
    return measure(adapted, Ranks(device=device_of()), adapted.rows, request)


def record_of_actor(worker: Any) -> DataProto:
    """Runs in each of the actor's workers: what the last analysis measured there."""
    return answer(worker.actor.engine.analysis_record)


class AnalysisEngine(VerlAnalysed):
    """What the analyses may ask of verl's engine.

    Args:
        engine: verl's ``FSDPEngineWithLMHead``.
        data: this rank's rows, verl's TensorDict.
        loss_function: training's, with the actor's config bound to it.
        clip: verl's own clipping of ``.grad``; returns the norm before it.
    """

    def __init__(self, engine: Any, data: Any, loss_function: Any, clip: Callable[[], torch.Tensor]):
        super().__init__(loss_function.keywords["config"], engine.scaler)
        self._engine, self._data, self._loss_function = engine, data, loss_function
        self.module, self.optimizer, self.clip = engine.module, engine.optimizer, clip
        self.device = torch.device(device_of())
        self.grad_clip = engine.optimizer_config.clip_grad
        self.rows = self._padded_rows()
        self._ranks = Ranks(device=device_of())
        is_real = self.rows[BUCKET_KEY] >= 0
        self._num_tokens = int(self._ranks.sum([float(self.rows["response_mask"][is_real].sum())])[0])

    def _padded_rows(self) -> dict[str, torch.Tensor]:
        """This rank's rows as an analysis deals in them."""
        data = self._data
        lengths = data["input_ids"].offsets().diff().cpu()
        self._lengths = data["responses"].offsets().diff().cpu()
        rows = {
            _INDEX_KEY: torch.arange(len(data)),
            "attention_mask": torch.arange(int(lengths.max())) < lengths.unsqueeze(1),
            "response_mask": padded(data["response_mask"]).cpu(),
        }
        rows |= {key: padded(data[key]).cpu() for key in _DENSE if key in data.keys()}
        rows[BUCKET_KEY] = rows[BUCKET_KEY].flatten()
        self._width = max(values.shape[1] for key, values in rows.items() if key in (QUARTILE_KEY, "response_mask"))
        rows["response_mask"] = self._widened(rows["response_mask"])
        return rows

    def micro_batches(self, rows: Rows) -> Iterator[MicroBatch]:
        engine, config = self._engine, self._config
        size = config.ppo_mini_batch_size * config.rollout_n // engine.get_data_parallel_size()
        cutting = {
            "use_dynamic_bsz": engine.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": engine.engine_config.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": engine.engine_config.micro_batch_size_per_gpu,
            "sp_size": 1,
        }
        for mini_batch in rows[_INDEX_KEY].split(size):
            data = tu.index_select_tensor_dict(self._data, mini_batch).select("input_ids")
            data[_INDEX_KEY] = mini_batch
            tu.assign_non_tensor(data, **cutting)
            for micro_batch in prepare_micro_batches(data, engine.get_data_parallel_group())[0]:
                chosen = micro_batch[_INDEX_KEY].cpu()
                is_real = rows[BUCKET_KEY][chosen] >= 0
                chosen = chosen[is_real] if is_real.any() else chosen
                inputs = {key: values[chosen].to(self.device) for key, values in rows.items()}
                inputs[_WIDTH_KEY] = self._lengths[chosen].max().expand(len(chosen))
                yield MicroBatch(inputs, chosen if is_real.any() else chosen[:0], on_policy=False)

    def forward(self, inputs: Rows, with_entropy: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        output: dict[str, torch.Tensor] = {}

        def keep(model_output: dict[str, torch.Tensor], **_: Any) -> tuple[torch.Tensor, dict]:
            output.update(model_output)
            return torch.zeros(()), {}

        data = self._of(inputs)
        wants = self._config.calculate_entropy or "entropy" in self.terms if with_entropy is None else with_entropy
        tu.assign_non_tensor(data, calculate_entropy=bool(wants))
        FSDPEngineWithLMHead.forward_step(self._engine, data, keep, forward_only=False)
        unpack = Layout(data, self.device).unpack
        values = [output.get(name) for name in ("log_probs", "entropy")]
        log_prob, entropy = (None if each is None else self._widened(unpack(each.values())) for each in values)
        return log_prob, entropy

    def log_prob(self, inputs: Rows) -> torch.Tensor:
        with torch.no_grad(), readout_of(self.module, self._engine._autocast_dtype, is_fused(self._data)):
            return self.forward(inputs, with_entropy=False)[0]

    def loss_terms(
        self, inputs: Rows, log_prob: torch.Tensor, entropy: torch.Tensor | None, on_policy: bool
    ) -> dict[str, torch.Tensor]:
        data = self._of(inputs)
        mask = padded(data["response_mask"])
        tu.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=max(int(mask.sum()), 1), global_batch_size=len(inputs[_INDEX_KEY])
        )
        width = mask.shape[1]
        output = {"log_probs": pack(log_prob[:, :width], data)}
        rng = RngState(self.device)  # some losses draw: every term is of the same draw
        divisor = self._config.loss_scale_factor or int(inputs[_WIDTH_KEY][0])
        config = changed(self._config, global_batch_info={}, loss_scale_factor=divisor)
        terms = {"task": self._loss(output, data, config, use_kl_loss=False)}
        if "entropy" in self.terms and entropy is not None:
            rng.restore()
            with_entropy = {**output, "entropy": pack(entropy[:, :width], data)}
            terms["entropy"] = self._loss(with_entropy, data, config, use_kl_loss=False) - terms["task"]
        if "kl" in self.terms:
            rng.restore()
            terms["kl"] = self._loss(output, data, config, use_kl_loss=True) - terms["task"]
        return terms

    def share(self, part: MicroBatch, term: str, num_rows: int) -> float:
        if term == "task" and is_of_micro_batch(self._config):
            return 1.0 / self._ranks.size
        if self.aggregation(term) == "token-mean":  # verl averages over the tokens of the whole mini-batch
            return int(part.inputs["response_mask"].sum()) / max(self._num_tokens, 1)
        return len(part.rows) / num_rows

    def aggregation(self, term: str) -> str:
        return super().aggregation(term).removesuffix("-norm")  # here a mean over sequences, divided by a constant

    # ---- inside

    def _loss(self, output: dict[str, torch.Tensor], data: Any, config: Any, use_kl_loss: bool) -> torch.Tensor:
        given = {**self._loss_function.keywords, "config": changed(config, use_kl_loss=use_kl_loss)}
        return self._loss_function.func(*self._loss_function.args, **given, model_output=output, data=data)[0]

    def _of(self, inputs: Rows) -> Any:
        """The engine's own rows for these."""
        return tu.index_select_tensor_dict(self._data, inputs[_INDEX_KEY].cpu()).to(device_of())

    def _widened(self, values: torch.Tensor) -> torch.Tensor:
        return pad(values, (0, self._width - values.shape[1]))
