# SPDX-License-Identifier: Apache-2.0
"""Add the driver's side of GradLoc to verl's V1 trainers: send policies with a batch, ask for the ranks' reports.

A batch is in verl's TransferQueue; the driver's view of it is padded, and fetched when it is read.

Shapes: R rows, P prompt and T response positions.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from ...analysis.config import check_separate
from ...analysis.reporter import AnalysisBatch
from ...config import fix_dump_dir
from ...keys import POLICY_KEY, ROW_KEY, SEQUENCE_KEY, VERSIONS_KEY
from ...loop.batch import BatchView, RowFacts
from ...loop.messages import Policy
from ...loop.metrics import joined
from ...private_api import extended, replaced
from ...record.columns import ACTOR, STORED
from ..verl_common.analyses import FILLER, VerlAnalyses, drawn_prompts, hand_over, prepared_by, twin_of
from ..verl_common.requirements import REWEIGHTING, asked_of, tables_for
from ..verl_common.trainer import Checkpointed, TrainerFeatures, Workers, WorkersUpdate
from ..verl_common.watch import answers_of
from .config import check_verl
from .engine import ASKED_KEY, AnalysisRequest, watch_actor, watch_critic
from .step import padded

logger = logging.getLogger(__name__)

_ACTOR = Workers("actor_rollout_wg", "actor", "actor.engine._watch.report", watch_actor)
_CRITIC = Workers("critic_wg", "train", "engine._watch.report", watch_critic)


class QueueUpdate(WorkersUpdate):
    """An update on verl's ``KVBatchMeta``; verl's own method adds to the metrics that it is given."""

    dp_size = property(lambda self: max(self.group._dispatch_info[self.workers.mesh]) + 1)

    def get(self, *names: str) -> list[torch.Tensor]:
        rows = fetch(self.batch, names).to_padded_tensor()
        return [rows[name] for name in names]

    def put(self, **tensors: torch.Tensor) -> None:
        self.trainer.gradloc.seen.forget()
        rows = fetch(self.batch, ["response_mask"])["response_mask"]
        put(self.batch, {name: response_to_nested(values, rows) for name, values in tensors.items()})

    def view(self) -> BatchView:
        is_critics = self.workers is _CRITIC
        is_distilled = bool(OmegaConf.select(self.trainer.config, "distillation.enabled"))
        return view_of(self.batch, self.trainer.gradloc.seen, is_critics, is_distilled and not is_critics)

    def run(self, policy: Policy) -> dict[str, Any]:
        self.watch()
        if policy.kind != "off":
            put(self.batch, {ROW_KEY: torch.arange(len(self.batch)).unsqueeze(-1)})
        metrics: dict[str, Any] = {}
        self.batch.extra_info[POLICY_KEY] = policy
        try:
            self.original(metrics)
        finally:
            self.batch.extra_info.pop(POLICY_KEY, None)
        return metrics


_PARTITION = "train"
"""Partition of verl's queue that holds training rollouts."""


class V1TrainerAnalyses(VerlAnalyses):
    """Analyses and rollout filter of verl's V1 trainer.

    Raises:
        ValueError: one sentence, for an analysis batch that this trainer cannot have.
    """

    def __init__(self, config: Any, settings: Any, analyses: tuple):
        mode, buckets = config.trainer.v1.trainer_mode, analyses[0]
        if buckets is not None and mode != "sync":
            check_separate(buckets, f"trainer.v1.trainer_mode={mode} rolls out further training batches meanwhile")
        super().__init__(config, settings.root, analyses)
        self.settings = settings
        self._temperature = config.actor_rollout_ref.rollout.temperature

    def filter(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Return verl's ``KVBatchMeta`` with the rows to train on, once rewards are known, and drop the others from
        the queue. Adds ``rollout/*`` to the step's metrics."""
        data = fetch(batch, ["rm_scores", "response_mask", "uid"])
        scores, mask = (data[name].to_padded_tensor(0) for name in ("rm_scores", "response_mask"))
        # verl itself fills up to whole mini-batches
        is_kept = self.kept_rows(list(data["uid"]), scores, mask, num_ranks=1, metrics=metrics)
        if is_kept is None:
            return batch
        keys, dropped = _split(batch.keys, is_kept)
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
        return batch.select_keys(keys)

    def _separate(self, seed: int) -> AnalysisBatch:
        self.afterwards.callback(_clear_all_but, _keys_in_queue())
        return super()._separate(seed)

    def view(self, update: WorkersUpdate) -> BatchView:
        _, real = _split_fillers(update.batch)
        return view_of(update.batch.select_keys(real))

    def ask(
        self, update: WorkersUpdate, tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Ask by verl's own call for log-probs. Rows that fill up the batch to whole mini-batches go last; workers
        run them because their peers wait."""
        fillers, real = _split_fillers(update.batch)
        whole = update.batch.select_keys([*real, *fillers])
        tensors = {**tensors, ROW_KEY: torch.arange(len(real))}
        put(whole, {key: _filled_up(values, len(fillers)) for key, values in tensors.items()})
        whole.extra_info |= {"compute_loss": True, "calculate_entropy": False, "temperature": self._temperature}
        whole.extra_info[ASKED_KEY] = AnalysisRequest(dict(request), self.settings)
        update.group.compute_log_prob(whole)
        return answers_of(update.group, "actor.engine.analysis_record")

    @staticmethod
    def prepare(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
        """Generate a batch for an analysis; its rows stay in verl's queue until they are cleared
        from it.
        """
        prompts = drawn_prompts(trainer, num_groups, seed)
        prompts["__rollout_n__"] = torch.full((num_groups,), group_size)  # verl's agent loop keeps a config of its own
        changes = {
            "actor_rollout_ref.rollout.n": group_size,
            "data.train_batch_size": num_groups,
            "data.gen_batch_size": None,
            "algorithm.filter_groups": None,  # which would have further training prompts rolled out
            "trainer.v1.sampler.sync_refill_failed_groups": False,
        }
        twin = twin_of(trainer, changes)
        twin.train_dataloader_it = iter([prompts])
        twin.replay_buffer = twin._build_replay_buffer()
        twin.curr_step_profile = False
        twin._update_critic = twin._update_actor = hand_over
        # verl has dropped the engine's weights after the training batch; the policy is still that of the last step
        trainer.checkpoint_manager.update_weights(trainer.global_steps - 1)
        return prepared_by(lambda: twin.step({}, {}))


def _split(keys: Sequence[str], flags: Iterable[bool]) -> tuple[list[str], list[str]]:
    """Split keys into those whose flag is set, and the others."""
    pairs = list(zip(keys, flags, strict=True))
    return [key for key, flag in pairs if flag], [key for key, flag in pairs if not flag]


def _split_fillers(batch: Any) -> tuple[list[str], list[str]]:
    """Split the rows into those that only fill up the batch, and the others."""
    return _split(batch.keys, [tag.get("is_padding", False) for tag in batch.tags])


def _keys_in_queue() -> set[str]:
    return set(tq.kv_list(_PARTITION).get(_PARTITION, ()))


def _clear_all_but(keys: set[str]) -> None:
    """Delete the rows that an analysis left in the queue, even if it failed: the trainer would train on them."""
    if others := _keys_in_queue() - keys:
        tq.kv_clear(keys=list(others), partition_id=_PARTITION)


def _filled_up(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append rows of fillers; the queue takes two dimensions."""
    values = values.view(len(values), -1)
    return torch.cat([values, values.new_full((num_rows, values.shape[1]), FILLER)])


class TrainerSide(TrainerFeatures):
    """Hook that a V1 trainer calls; methods are in the order of their calls, and do nothing for a part that is off.

    Raises:
        ValueError: one sentence, for a setting that is wrong or that these workers do not have.
    """

    def __init__(self, config: Any):
        asked = asked_of(config, tables_for(config))
        if any(feature != REWEIGHTING for feature in asked.features):
            check_verl("trainer")
        fix_dump_dir(config, asked.settings.root)
        clip_key = "actor_rollout_ref.actor.optim.clip_grad"
        self.switch_on(config, asked, clip_key, OmegaConf.select(config, clip_key))
        if asked.analyses is not None:
            self.analysis = V1TrainerAnalyses(config, asked.settings, asked.analyses)
        self.seen = SeenRows()

    def after_metrics(self, batch: Any, metrics: dict[str, Any], global_step: int) -> None:
        """Add metrics, once verl has computed the step's and before they are logged."""
        for driver in self.drivers:
            metrics.update(joined(driver.step_metrics))  # of several updates verl has taken the means
        _, real = _split_fillers(batch)
        self.judge(view_of(batch.select_keys(real), self.seen), metrics, global_step)


def _add_to(metrics: dict[str, Any], update_metrics: dict[str, Any]) -> None:
    """Add an update's metrics to the step's, lists as verl reduces them."""
    lists = {name: value for name, value in update_metrics.items() if isinstance(value, list)}
    metrics.update(update_metrics)
    metrics.update(reduce_metrics(lists))


class _RunEnded(Exception):
    """Ends the run after an analysis (``exit_after_gradient_analysis``); carries the step's metrics."""


class _Watched(Checkpointed):
    """Hooks of GradLoc in a trainer; the class is mixed in before one of verl's."""

    def __init__(self, config: Any):
        self.gradloc = TrainerSide(config)
        super().__init__(config)  # type: ignore[call-arg]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self.gradloc.build_drivers(self.config, self.tokenizer, tables_for(self.config))

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.gradloc.analysis is not None:
            self.gradloc.analysis.check_data(len(self.train_dataset))

    def on_init_end(self) -> None:
        """Refuse what only the workers know, before the first rollout."""
        super().on_init_end()
        if self.gradloc.is_in_update or self.gradloc.analysis is not None:
            QueueUpdate(self, _ACTOR, None).watch()
        if self.gradloc.critic is not None:
            QueueUpdate(self, _CRITIC, None).watch()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self.gradloc.begin_fit(self.logger)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        except _RunEnded as ended:
            (metrics,) = ended.args
            self.logger.log(data=metrics, step=self.global_steps)
            self._shutdown_dump_executor()

    def _balance_batch(self, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> Any:
        if self.gradloc.analysis is not None:
            batch = self.gradloc.analysis.filter(batch, metrics)
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        needs_facts = bool(self.gradloc.drivers) or self.gradloc.monitor is not None
        has_critic = self.gradloc.critic is not None
        with self.gradloc.seen.watching(batch, has_critic) if needs_facts else nullcontext():
            batch = super()._compute_advantage(batch, metrics)
        self.gradloc.reweight(QueueUpdate(self, _ACTOR, batch), metrics)
        return batch

    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        update = QueueUpdate(self, _CRITIC, batch, partial(super()._update_critic, batch))
        if self.gradloc.critic is None:
            return update.original(metrics)
        _add_to(metrics, self.gradloc.update_critic(update))
        return batch

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        update = QueueUpdate(self, _ACTOR, batch, partial(super()._update_actor, batch))
        if self.gradloc.analysis is not None:
            update.watch()
            if self.gradloc.analysis.run(update, metrics, getattr(self, "timing_raw", {})):
                raise _RunEnded(metrics)
        if not self.gradloc.is_in_update:
            return update.original(metrics)
        _add_to(metrics, self.gradloc.update_actor(update))
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self.gradloc.after_metrics(batch, metrics, global_steps)


def watch_trainers() -> None:
    """Replace each trainer that verl has registered by a subclass with the hook."""
    registry = trainer_base.TRAINER_REGISTRY
    for name, trainer in list(registry.items()):
        registry[name] = extended(trainer, _Watched)


# verl's names of fields in its queue
_SCORES, _TEACHER = "rm_scores", "teacher_logprobs"
_TOKEN_FIELDS = (*(column.tensor for column in STORED.values() if column.tensor and ACTOR in column.losses), _SCORES)
_CRITIC_FIELDS = ("values", "returns")
_FACT_FIELDS = ("response_mask", "advantages", *_CRITIC_FIELDS, _SCORES)
_LABELS = ("uid", "data_source", "index")


def fetch(batch: Any, fields: Sequence[str]) -> Any:
    """Return these fields of a batch, as verl's TensorDict, in the order of its rows; missing fields are left out."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def put(batch: Any, fields: dict[str, torch.Tensor]) -> None:
    """Write fields of a batch, in the order of its rows."""
    rows = TensorDict(fields, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows)
    if batch.fields is not None:
        batch.fields = [*dict.fromkeys([*batch.fields, *fields])]


def view_of(
    batch: Any, seen: "SeenRows | None" = None, is_critics: bool = False, is_distilled: bool = False
) -> BatchView:
    """Return the view of verl's ``KVBatchMeta``: a critic's with values and returns, distillation's with the teacher's
    log-probs. Facts that ``seen`` has of its rows are not fetched."""
    token_fields = (*_TOKEN_FIELDS, *_CRITIC_FIELDS) if is_critics else _TOKEN_FIELDS
    teacher = [_TEACHER] if is_distilled else []

    @cache
    def whole() -> tuple[dict[str, torch.Tensor], dict[str, Sequence[Any]]]:
        rows = fetch(batch, ["prompts", "responses", "position_ids", *token_fields, *_LABELS, *teacher])
        return _tensors(rows, token_fields), _labels(batch, rows)

    def facts() -> RowFacts:
        known = None if seen is None else seen.facts(batch, is_critics)
        return _facts(fetch(batch, _FACT_FIELDS), is_critics) if known is None else known

    def uids() -> dict[str, list[str]]:
        known = None if seen is None else seen.uids(batch)
        return {"uid": list(fetch(batch, ["uid"])["uid"]) if known is None else known}

    labels = _Lazy(lambda: whole()[1], {"uid": uids})
    return BatchView(_Lazy(lambda: whole()[0], {}), labels, is_critics, is_distilled, None if is_distilled else facts)


def _facts(rows: Mapping[str, Any], is_critics: bool) -> RowFacts:
    """Read the rows' facts off verl's nested tensors, ``_FACT_FIELDS``."""
    mask, scores = rows["response_mask"], rows[_SCORES] if _SCORES in rows.keys() else None
    if not is_critics:
        return RowFacts.from_nested(mask, rows["advantages"], scores)
    errors = rows["returns"].values() - rows["values"].values()
    return RowFacts.from_nested(mask, torch.nested.nested_tensor_from_jagged(errors, mask.offsets()), scores)


class SeenRows:
    """Keeps facts of a step's rows from what verl reads and writes in its queue to compute advantages.

    So a healthy step fetches nothing more.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the facts of rows that changed."""
        self._row_of_key: dict[str, int] = {}
        self._uids: list[str] = []
        self._known: dict[bool, RowFacts] = {}

    @contextmanager
    def watching(self, batch: Any, has_critic: bool) -> Iterator[None]:
        """Note facts while verl computes the advantages of a batch."""
        self.forget()
        rows: dict[str, Any] = {}

        def kv_batch_get(*args: Any, **kwargs: Any) -> Any:
            found = tq.kv_batch_get(*args, **kwargs)
            rows.update({name: found[name] for name in (*_FACT_FIELDS, "uid") if name in found.keys()})
            return found

        def kv_batch_put(*args: Any, **kwargs: Any) -> Any:
            fields = kwargs["fields"]
            rows.update({name: fields[name] for name in _FACT_FIELDS if name in fields.keys()})
            return tq.kv_batch_put(*args, **kwargs)

        noting = SimpleNamespace(**{**vars(tq), "kv_batch_get": kv_batch_get, "kv_batch_put": kv_batch_put})
        with replaced(trainer_base, tq=noting):
            yield
        try:
            models = (False, True) if has_critic else (False,)
            self._known = {is_critics: _facts(rows, is_critics) for is_critics in models}
            self._row_of_key, self._uids = {key: row for row, key in enumerate(batch.keys)}, list(rows["uid"])
        except Exception as error:  # another verl computes them in another way
            logger.info("gradloc: facts of healthy steps are fetched from verl's queue, at some cost: %r", error)
            self.forget()

    def facts(self, batch: Any, is_critics: bool) -> RowFacts | None:
        """Return the facts of the batch's rows, in their order; None for rows that verl did not read."""
        rows = self._rows(batch)
        return None if rows is None or is_critics not in self._known else self._known[is_critics].at(torch.tensor(rows))

    def uids(self, batch: Any) -> list[str] | None:
        """Return the name of each row's prompt; None for rows that verl did not read."""
        rows = self._rows(batch)
        return None if rows is None else [self._uids[row] for row in rows]

    def _rows(self, batch: Any) -> list[int] | None:
        are_known = all(key in self._row_of_key for key in batch.keys)
        return [self._row_of_key[key] for key in batch.keys] if are_known else None


class _Lazy(Mapping[str, Any]):
    """A mapping that is fetched when it is read; reading a key of ``parts`` fetches that part alone."""

    def __init__(self, whole: Callable[[], Mapping[str, Any]], parts: Mapping[str, Callable[[], Mapping[str, Any]]]):
        self._whole, self._parts = whole, parts

    def __getitem__(self, key: str) -> Any:
        return self._parts.get(key, self._whole)()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


def _tensors(rows: Any, token_fields: Sequence[str]) -> dict[str, torch.Tensor]:
    """Pad verl's nested tensors: prompts on the left, responses on the right."""
    prompts, responses = rows["prompts"], rows["responses"]
    prompt_lengths, response_lengths = prompts.offsets().diff(), responses.offsets().diff()
    prompt_width = int(prompt_lengths.max())
    is_prompt = torch.arange(prompt_width) >= prompt_width - prompt_lengths.unsqueeze(1)
    is_response = torch.arange(int(response_lengths.max())) < response_lengths.unsqueeze(1)
    attention_mask = torch.cat([is_prompt, is_response], 1).long()
    input_ids = torch.zeros_like(attention_mask)
    input_ids[:, :prompt_width][is_prompt] = prompts.values()
    input_ids[:, prompt_width:][is_response] = responses.values()
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": _positions(rows["position_ids"], attention_mask, prompt_width - prompt_lengths),
        "responses": input_ids[:, prompt_width:],
        **{name: padded(rows[name]) for name in token_fields if name in rows.keys()},
    }
    if _TEACHER in rows.keys():
        tensors["teacher_log_probs"] = no_padding_2_padding(rows[_TEACHER], rows).squeeze(-1)
    if _SCORES in tensors:
        tensors["token_level_scores"] = tensors.pop(_SCORES)
    return tensors


def _positions(nested: torch.Tensor, attention_mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return position ids (R, P + T), or (R, C, P + T) where pictures have positions of their own."""
    rows = nested.unbind()
    if rows[0].dim() == 1:
        return (attention_mask.cumsum(1) - 1).clamp(min=0)
    positions = rows[0].new_zeros(len(rows), rows[0].shape[0], attention_mask.shape[1])
    for padded_row, start, row in zip(positions, starts.tolist(), rows, strict=True):
        padded_row[:, start : start + row.shape[1]] = row
    return positions


def _labels(batch: Any, rows: Any) -> dict[str, Sequence[Any]]:
    labels = {name: list(rows[name]) for name in _LABELS if name in rows.keys()}
    ids = list(map(_sequence_id, batch.keys, labels["uid"]))
    steps = [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in batch.tags]
    labels[VERSIONS_KEY] = [None if None in span else (int(span[0]), int(span[1])) for span in steps]
    return {SEQUENCE_KEY: ids, "multi_modal_inputs": _LazyInputs(batch), **labels}


def _sequence_id(key: str, uid: str) -> str:
    """Return ``<uid>:<rollout>`` of verl's ``<uid>_<rollout>_<part>``; parts after the first keep their number."""
    return f"{uid}:{key.removeprefix(f'{uid}_').removesuffix('_0')}"


class _LazyInputs(Sequence[Any]):
    """The rows' multi-modal inputs, which are large: each is fetched when it is read."""

    def __init__(self, batch: Any):
        self._batch = batch
        self._known: dict[int, Any] = {}

    def __getitem__(self, row: Any) -> Any:
        if row not in self._known:
            key, batch = self._batch.keys[row], self._batch
            rows = tq.kv_batch_get(keys=[key], partition_id=batch.partition_id, select_fields=["multi_modal_inputs"])
            (self._known[row],) = tu.get(rows, "multi_modal_inputs") or [None]
        return self._known[row]

    def __len__(self) -> int:
        return len(self._batch.keys)
