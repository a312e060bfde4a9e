# SPDX-License-Identifier: Apache-2.0
"""Watch any PyTorch loop, in one line:

    gradloc.Watch(model, optimizer, "runs/x", tokenizer=tokenizer)

Two taps are enough: on the model (:mod:`.taps`), and on the optimizer, whose step is about to be taken. Between them
the loop's loss, its clip and its scaler are its own. A step of the loop, in the order of the calls:

1. each forward: ``_begin_forward``; the tap keeps the forward's inputs;
2. each ``loss.backward()``: the tap keeps dL/dh, then ``_after_backward`` notes the norm so far;
3. the loop's clip, where there is one: :mod:`.clips` notes the norm before it;
4. ``optimizer.step()``: torch calls ``_before_step`` first. From there ``check_step`` and ``_handle_step`` ask for the
   driver's policy, search a spike, act, and have the event written. Only then does the optimizer step.

Shapes: B rows of a micro-batch, T positions.
"""

import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..analysis.config import taken_from
from ..checks import require
from ..config import GradLocConfig
from ..core.gradients import Gradient, GradientSpace
from ..core.probe import Prober
from ..core.ranks import LostRank, PeerFailure, Ranks, host_group
from ..core.sharding import compute_device, is_compiled
from ..explain.advice import LOOP
from ..explain.text import plural
from ..fault.updates import Undo
from ..loop.batch import BatchView, Rows, as_arrays
from ..loop.driver import AbortedBySpike, Driver
from ..loop.localizer import Localizer
from ..loop.messages import Policy
from ..record import Run
from ..record.origin import with_origin
from .analyses import LoopAnalyses
from .clips import ClipTap, plain
from .curve import Curve
from .forwarded import count_backward
from .megatron import is_chunk
from .models import Engine, find_engine, innermost, sparse_embedding
from .notes import Notes
from .optimizers import Withheld, call_after_closure, call_after_zero_grad, plain_optimizer, share_parameter
from .replay import check_replay, versions
from .rows import StepCounts, view_of, view_of_summaries
from .settings import loop_settings
from .tap_step import TapStep
from .taps import ModelTap
from .zero import ZeroEngine, is_engine

logger = logging.getLogger(__name__)

_EARLY = 10  # optimizer steps, after which it is said once that nothing could be watched
_MANY = 64  # forwards without an optimizer step, after which that is said once
_NO_VIEWS = 'false with gradloc.Watch, whose replays would overwrite the gradient (action="off" trains without)'
_watches: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Watch]]" = weakref.WeakKeyDictionary()


class Watch(Notes):
    """Looks into the optimizer steps of one model, in every process.

    Processes are all alike: each has a rank's side of a search, and the first the driver's, too. They exchange
    three small messages an optimizer step.

    It lives as long as the model. A second watch on a model takes the place of the first.

    Args:
        model: plain, compiled, with adapters, in DDP, FSDP1 or FSDP2; or what such a wrapper is made around later.
            DeepSpeed's engine, or Megatron's list of model chunks.
        optimizer: torch's, or accelerate's around it; None: found at its first step, by its parameters. Megatron's own.
        folder: of the run; events go to ``gradloc`` in it, metrics to ``metrics.jsonl``.
        action: ``observe``, ``mask``, ``skip``, ``abort`` or ``off``.
        tokenizer: decodes what is named; None: events have token ids alone.
        scaler: not needed any more; loops that passed their ``GradScaler`` may go on to do so.
        hidden: the module whose output is the last hidden state, or its name. Needed where neither a transformers model
            says it, nor a linear layer is called last, and the model's output is too large to keep its gradient.
        keep_gb: what may be kept on the device in a step, in GiB. Beyond it dL/dh waits in the host's memory, and
            dL/dlogits is recovered from it at a spike.
        metrics: write ``metrics.jsonl``; False where the loop writes its own there.
        undo: for an optimizer whose last step cannot be undone from its state by the rules of torch's Adam, AdamW and
            SGD with momentum: called with a parameter's local shard, its state and its group's hyperparameters, returns
            the shard before the step, or None.
        settings: further blocks by name, as ``trigger={"tau": 640.0}``; docs/configuration.md has all. ``buckets`` and
            ``quartiles``, True or with settings, take a step's gradient apart now and then.

    Raises:
        ValueError: one sentence, for a wrong setting or a model without trained parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any = None,
        folder: str | os.PathLike[str] = "runs/gradloc",
        action: Any = "observe",
        tokenizer: Any = None,
        scaler: Any = None,
        hidden: torch.nn.Module | str | None = None,
        keep_gb: float = 0.25,
        metrics: bool = True,
        undo: Undo | None = None,
        **settings: Any,
    ):
        engine, model = find_engine(model, optimizer)
        analyses = taken_from(settings)
        kept = None if action == "off" else loop_settings(action, settings, os.fspath(folder))
        if kept is not None:
            is_trained = any(param.requires_grad for param in model.parameters())
            require(is_trained, "gradloc.Watch's model", "one with a parameter that requires a gradient", "none")
            has_views = isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
            require(not has_views, "DistributedDataParallel's gradient_as_bucket_view", _NO_VIEWS, True)
        ranks = Ranks(None if kept is None else host_group(), device=self._device_of(model))
        self._curve = Curve(os.path.join(os.path.abspath(folder), "metrics.jsonl")) if metrics else None
        self.model = model
        self.optimizer: Any = None if engine is not None else plain_optimizer(optimizer)
        self.scales_loss, self.takes_what_is_not_finite, self.is_unclipped = False, True, False
        """Facts that the localizer asks for, see :class:`~..loop.localizer.TrainerHandle`."""
        self.step: Any = None
        """The optimizer step that is being made; None between two."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step by name, for any tracker; on the first process."""
        self.number = 0
        """The number of optimizer steps so far, or the trainer's own."""
        self._last_optimizer: Callable[[], Any] = lambda: None  # that took a step, weakly
        self._num_steps = self._num_checked = 0
        self._withheld = Withheld()
        self._is_checked = False
        """Whether :meth:`check_step` was called for the step that is about to be taken."""
        self._next_number: int | None = None
        self._before: Gradient | None = None
        """The gradient as the loop left it, while ``.grad`` holds it as it was before clipping."""
        self._ids_of: Any = None  # the space whose parameters' ids are kept
        self._ids: set[int] = set()
        self._handles: list[Any] = []
        self._has_warned = False
        self.analyses: LoopAnalyses | None = None
        self.is_analysing = False
        """Whether steps of the optimizer are an analysis' own, which are taken back."""
        self.stage_name = ""
        self.ranks, self.settings = ranks, kept
        self.engine: Engine | None = None
        """DeepSpeed's or Megatron's, once there is one."""
        self.localizer: Any = None
        """None where the action is off."""
        self.driver = None
        if kept is None:
            return
        self.localizer = Localizer(self, ranks, kept)
        self.localizer.updates.undo = undo
        names = {"project": "torch", "experiment": os.path.basename(os.path.abspath(folder))}
        self.analyses = LoopAnalyses(analyses, kept.root, names)
        if ranks.is_first:
            self.driver = self._make_driver(kept, names["experiment"], tokenizer)
            self.driver.print_start()
        before = _watches.pop(innermost(model), lambda: None)()
        if before is not None:
            before.close()
        _watches[innermost(model)] = weakref.ref(self)
        if is_compiled(model):  # code that was compiled before has no hooks of ours, and is taken for any such model
            torch.compiler.reset()
        self.tap = ModelTap(model, ranks.device, hidden, int(keep_gb * 2**30))
        self.clips = ClipTap(self._owns)
        self._listen()
        if (name := sparse_embedding(model)) is not None:
            self._warn_once(f"{name} has sparse gradients: make it sparse=False. Nothing is watched")
            self.localizer.switch_off()
            self.close()
        elif engine is not None:
            self._take_engine(engine)

    def _device_of(self, model: torch.nn.Module) -> torch.device:
        return compute_device(next(model.parameters()))

    def _make_driver(self, settings: GradLocConfig, name: str, tokenizer: Any) -> Driver:
        run = replace(with_origin(Run(None, name), {}, "torch"), trainer=LOOP)
        driver = Driver(settings, tokenizer=tokenizer, run=run, trained={})
        driver.action_key = "action"
        return driver

    def close(self) -> None:
        """Take all hooks away."""
        if self.localizer is not None:
            self.tap.close()
            self.clips.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- what a loop may call

    def clip_grad_norm_(self, max_norm: float | None = None) -> torch.Tensor:
        """Clip the gradient as ``torch.nn.utils.clip_grad_norm_`` does, and look into the step now if it spikes.

        Args:
            max_norm: what the L2 norm is clipped to; None: it is not.

        Returns:
            The norm before clipping, of the gradient that the optimizer is given: 0 where the step is skipped.

        Raises:
            AbortedBySpike: where a spike is to stop the run.
        """
        limit = float("inf") if max_norm is None else float(max_norm)
        outer = self.model if self.localizer is None else self.tap.outer
        outer = getattr(outer, "_orig_mod", outer)  # of a compiled one
        if isinstance(outer, FSDP1):
            norm = plain(outer.clip_grad_norm_(limit))
        elif max_norm is None:  # torch's clip to infinity makes all of a gradient NaN whose norm is infinite
            norm = plain(torch.nn.utils.get_total_norm([p.grad for p in outer.parameters() if p.grad is not None]))
        else:
            norm = plain(torch.nn.utils.clip_grad_norm_(outer.parameters(), limit))
        if self._leaves_to_scaler(norm):
            return norm
        self._is_checked = True
        return self.check_step(norm)

    def _leaves_to_scaler(self, norm: torch.Tensor) -> bool:
        """Return whether an overflow of fp16 may be the scale's alone: then the loop's scaler takes no step.

        Where log-probs were given, their derivatives say so; elsewhere the optimizer's step does.
        """
        if self.localizer is None or math.isfinite(float(norm)):
            return False
        done = [each for each in self.tap.forwards if each.is_done]
        is_scaled = any(each.dtype == torch.float16 for each in done)
        is_unknown = any(each.coefficient is None and not each.has_log_probs for each in done)
        return all(self.ranks.max([float(is_scaled), float(is_unknown)]))

    def check_step(self, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Check whether the step that is about to be taken spikes; if so, search and act.

        The tap on the optimizer calls this. A failure of ours ends the watching, and not the run.

        Args:
            norm: of its gradient before clipping, where it is known.

        Returns:
            The norm of the gradient that the optimizer is given, before clipping.

        Raises:
            AbortedBySpike: where a spike is to stop the run.
        """
        taken = None
        try:
            taken = None if self.localizer is None else self._handle_step(norm)
        except AbortedBySpike:
            raise
        except Exception as error:
            self.tap.give_up(error)
        otherwise = torch.zeros(()) if norm is None else norm
        return otherwise if taken is None else taken

    def make_step(self) -> TapStep:
        """Make the step that is about to begin."""
        return TapStep(self.tap, self.ranks)

    # ---- a step, on all ranks together

    def _begin_step(self) -> None:
        """Begin a step, before its first micro-batch's forward."""
        self.step = self.make_step()
        make_space: Any = partial(GradientSpace, self.tap.outer) if self.engine is None else self.engine.make_space
        self.space = make_space(self.ranks)
        self.localizer.begin_update(None, self.space, are_all_here=False)
        self.localizer.begin_mini_batch(self.step)

    def _handle_step(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Get the driver's policy, search and act if the step spikes, and have the driver write the event.

        Returns:
            The norm as :meth:`check_step` does; None where no rank has a micro-batch.
        """
        if self.step is not None:
            self.step.take(self.tap.take_done())
        counts = StepCounts.gather(self.step, self.ranks)
        if not any(counts.micro_batches):
            return None
        if self.step is None:  # another rank has micro-batches
            self._begin_step()
        self._num_checked += 1
        self.scales_loss = any(counts.scaled)
        self.takes_what_is_not_finite = not self.scales_loss
        self._settle_outer()
        self.space.heads = self.tap.head_names(self.space)
        with torch.no_grad():
            if self.engine is not None:
                self.space.show()
                self.clips.take_engine(self.engine.clip_limit)
                self.step.num_ranks = self.engine.divisor or self.ranks.size
                norm, self.is_unclipped = torch.tensor(self.space.norm()), True  # it clips in its step
            norm = plain(self.clips.norm(self.space, norm))
        self.number = self.number + 1 if self._next_number is None else self._next_number
        self._next_number = None
        localizer = self.localizer
        try:
            with torch.enable_grad():  # the loop may clip without
                localizer.check_replicas()
                policy, decided = self._policy(counts, norm)
                policy = None if policy is None else self.prepare_search(decided, policy)
                taken = localizer.before_step(decided, policy)
                localizer.end_update()
                analysed = self._analyse(float(decided))
                self.step.release()
                self._send(analysed)
        finally:
            self.is_unclipped = False
            is_replaced = any(spike.taken != "observe" for spike in localizer.outcomes)
            if self._before is not None and not is_replaced:
                self.space.put(self._before)
            if self.engine is not None:
                self.space.give()
            self.step, self._before, self.stage_name = None, None, ""
        self._write_metrics(decided)
        return taken if is_replaced else norm

    def _analyse(self, norm: float) -> dict[str, float]:
        """Take the step apart, where an analysis is due; returns its metrics on the first process."""
        if self.analyses is None or not self.analyses.are_due(self.number):
            return {}

        def view() -> BatchView | None:
            by_rank = self.ranks.gather_first(self.step.all_rows())
            return None if by_rank is None else self.view(by_rank)

        self.is_analysing = True
        try:
            return self.analyses.run(self.number, partial(self._objection_to_analysis, norm), self, view)
        finally:
            self.is_analysing = False

    def _objection_to_analysis(self, norm: float) -> str:
        """Run the gradient again from the taps, unless a spike had that done; returns why none can run, or ""."""
        if self.engine is not None:
            return "an analysis does not run on DeepSpeed or Megatron"
        if not math.isfinite(norm):
            return "the gradient of this step is not finite"
        if self._before is None and not self.step.has_log_probs:
            try:
                self._prepare(norm)
            except PeerFailure as error:
                return str(error)
        if not self.step.objection and self.optimizer is None:
            return "an analysis needs the optimizer: pass it to gradloc.Watch"
        return self.step.objection or self.step.obstacle

    def _policy(self, counts: StepCounts, norm: torch.Tensor) -> tuple[Policy | None, torch.Tensor]:
        """Get the driver's policy for this step, on every rank; None where the step cannot be looked into. The first
        rank's norm comes with it, on the host, and decides for all."""
        self.step.first_row = int(sum(counts.rows[: self.ranks.rank]))
        policy = None
        if self.driver is not None:
            policy = self.driver.before_update([int(sum(counts.tokens))], self.number, self.stage_name)
        policy, number = self.ranks.broadcast_from(0, (policy, float(norm) if self.ranks.is_first else None))
        decided = torch.tensor(number, dtype=norm.dtype)
        if len(set(counts.micro_batches)) == len(set(counts.opened)) == 1:
            return policy, decided
        found = ", ".join(f"{count:.0f}" for count in counts.micro_batches)
        self._warn_once(f"steps are looked into where all ranks run as many micro-batches, found {found}")
        return None, decided

    def prepare_search(self, norm: torch.Tensor, policy: Policy) -> Policy | None:
        """Put the gradient of a step that spikes back as it was before clipping, by running it again from the taps.

        All ranks call this together: each has as many micro-batches.

        Returns:
            The policy; None: do not search.
        """
        spike = policy.spike(float(norm), 0)
        if spike is None or self.localizer.is_off:
            return policy
        if spike.kind == "non_finite" and self.scales_loss and self.localizer.run_safely(self.localizer.is_loss_finite):
            return None  # an overflow by the scale alone
        is_ready = self.localizer.run_safely(partial(self._prepare, spike.grad_norm, spike.threshold))
        return policy if is_ready else None

    def _send(self, analysed: dict[str, float]) -> None:
        """Send the ranks' reports and rows of the step to the driver, on the first process.

        Raises:
            AbortedBySpike: on every process, where a spike is to stop the run.
        """
        step, localizer, driver = self.step, self.localizer, self.driver
        is_written = any(spike.is_written for spike in localizer.outcomes)
        rows: Any = as_arrays(step.all_rows()) if is_written else step.summaries()
        report = localizer.report()  # its events stay here: all that is gathered is padded to the longest
        by_rank = self.ranks.gather_first((replace(report, events=()), rows))
        self.metrics = {}

        def learn() -> AbortedBySpike | None:
            """Write the event, on the first process; returns why it ends the run, if it does."""
            if by_rank is None or driver is None:
                return None
            reports, rows_by_rank = zip(*by_rank, strict=True)
            batch = self.view(rows_by_rank) if is_written else view_of_summaries(rows_by_rank, self.signal)
            try:
                metrics = driver.after_update((report, *reports[1:]), batch)
            except AbortedBySpike as error:
                return error
            self.metrics = {name: float(value) for name, (value,) in metrics.items()} | analysed
            return None

        if any(spike.taken == "abort" for spike in localizer.outcomes):
            why = self.ranks.run_slowly_synced(learn)  # a launcher ends the first process with any other that has ended
            raise why or AbortedBySpike("gradloc stopped the run at a gradient spike: the first process says why.")
        learn()

    def _warn_once(self, why: str) -> None:
        if why and self.ranks.is_first and not self._has_warned:
            self._has_warned = True
            logger.warning("gradloc: %s", why)

    # ---- what was learned

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state, for the loop's checkpoint; on the first process all of it."""
        return {"number": self.number, "driver": None if self.driver is None else self.driver.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.number = int(state["number"])
        if self.driver is not None and state["driver"] is not None:
            self.driver.load_state(state["driver"])

    # ---- what the localizer asks

    @property
    def clip_limit(self) -> float:
        """The norm that the loop clips to; inf: not clipped yet."""
        return self.clips.limit

    def clip(self) -> torch.Tensor:
        """Clip what is in ``.grad`` as the loop clipped; returns the norm before."""
        return self.clips.again(self.space)

    def save_weights(self, global_step: int) -> str | None:
        """Save nothing: a loop keeps its own checkpoints."""
        return None

    @property
    def signal(self) -> str:
        """Name what :meth:`.tap_step.TapStep.summaries` has of a row, with its number of tokens."""
        return "advantages" if self.step.has_advantages else "loss_weights"

    def view(self, by_rank: Sequence[Rows]) -> BatchView:
        """Join all ranks' rows to one batch."""
        return view_of(by_rank)

    # ---- inside

    def _prepare(self, norm: float, threshold: float | None = None) -> bool:
        """Run the step again from the taps: ``.grad`` then has the gradient before clipping. Returns True."""
        step, space, ranks = self.step, self.space, self.ranks
        changed = sum(each.forwarded.is_changed for each in step.micro_batches)
        (changed,) = ranks.sum([float(changed)])
        if changed:
            step.objection = (
                f"{plural(int(changed), 'micro-batch')} cannot be run again: an input was changed in place after its "
                "forward; give the model a copy"
            )
            return True
        state, before = space.forward_state(), space.take()
        try:
            step.settle()
            if math.isfinite(norm):
                prober = Prober(step, space, ranks)
                prober.compute((index, None) for index in range(step.num_micro_batches))
                step.spent = step.num_micro_batches + prober.num_forwards, prober.num_backwards
                check_replay(step, space, before, self.clips, norm, threshold or norm / 2)
                self.is_unclipped = True
            else:
                space.put(before)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, LostRank):
                space.abandon_pass()  # a forward that was cut off leaves FSDP in the middle of it
            space.put(before)
            raise
        finally:
            space.reshard()
            state.restore()
        self._before = before
        return True

    def _owns(self, param: Any) -> bool:
        if self.step is None:  # on one process no gradient is the model's then
            return self.ranks.num_processes > 1 and any(param is own for own in self.tap.outer.parameters())
        if self._ids_of is not self.space:
            self._ids_of, self._ids = self.space, {id(own) for own in self.space.params}
        return id(param) in self._ids

    # ---- the taps' calls

    def _listen(self) -> None:
        # the model's hooks hold the tap, and by it the watch
        self.tap.on_begin, self.tap.on_backward = self._begin_forward, self._after_backward
        self.tap.on_failure, self.tap.on_other_state = self._step_aside, self.localizer.forget_reference
        reference = weakref.ref(self)  # torch holds its hooks on all optimizers and modules for ever
        self._handles.append(register_optimizer_step_pre_hook(partial(_to, reference, "_before_step")))
        self._handles.append(register_optimizer_step_post_hook(self._withheld.give_back))
        if self.optimizer is not None:
            self._listen_to_zero_grad()
        is_wrapped = isinstance(self.tap.outer, DistributedDataParallel | FSDP1) or is_chunk(self.tap.outer)
        if (self.ranks.num_processes > 1 or "deepspeed" in sys.modules) and not is_wrapped:
            self._handles.append(register_module_forward_pre_hook(partial(_to, reference, "_find_wrapper")))

    def follow(self, optimizer: Any) -> None:
        """Take this optimizer for the model's where none was known, or where it takes the known one's place."""
        found, known = plain_optimizer(optimizer), self.optimizer
        is_second, self._last_optimizer = self._last_optimizer() is found, weakref.ref(found)
        if known is None or (is_second and found is not known and share_parameter(found, known)):
            self.optimizer = found
            self._listen_to_zero_grad()

    def _step_aside(self, error: Exception) -> None:
        """Stop watching after a failure of ours between a forward and its step; the run goes on."""
        what = f"{type(error).__name__}: {error}"
        logger.error("gradloc: watching failed (%s), so it is off; training goes on", what, exc_info=error)
        self.step = None

    def _take_engine(self, engine: Engine) -> None:
        """Let an engine run the passes from here on, and look into its optimizer's steps."""
        self.engine = engine
        if why := engine.refusal():
            self._warn_once(f"{why}. Nothing is watched")
            self.localizer.switch_off()
            self.close()
            return
        self.tap.whole = getattr(engine, "whole", self.tap.whole)
        self.tap.around_pass = self._in_pass
        engine.on_step(partial(_to, weakref.ref(self), "_check_before_step", engine.optimizer))

    @contextmanager
    def _in_pass(self, is_last: bool) -> Iterator[None]:
        with self.engine.in_pass(is_last):  # type: ignore[union-attr]
            yield
        if is_last:
            self.space.show()

    def _find_wrapper(self, module: torch.nn.Module, args: Any) -> None:
        """Take a wrapper's calls for training's, where the model was wrapped after this was made."""
        if self.engine is None and is_engine(module) and innermost(module) is innermost(self.tap.outer):
            self._take_engine(ZeroEngine(module))
        is_wrapper = isinstance(module, DistributedDataParallel | FSDP1)
        if is_wrapper and innermost(module) is innermost(self.tap.outer) and module is not self.tap.outer:
            self.tap.attach(module)

    def _listen_to_zero_grad(self) -> None:
        call_after_zero_grad(self.optimizer, partial(_to, weakref.ref(self), "_drop"))

    def _begin_forward(self) -> None:
        self._withheld.give_back()  # where the step raised an error
        if self.step is None:
            self._begin_step()
        else:
            self._drop_what_is_gone()
        self.clips.follow_writes(self.space.params)
        if self.tap.num_seen == _MANY and self._num_steps == 0:
            self._warn_once(
                f"{_MANY} forwards and no step of an optimizer with this model's parameters: nothing can be watched. "
                "Pass the optimizer whose step() the loop calls"
            )

    def _after_backward(self) -> None:
        if self.step is None or self.engine is not None:
            return
        done = [each for each in self.tap.forwards if each.is_done]
        is_sharded = isinstance(self.tap.outer, FSDP1 | FSDPModule)
        if not is_sharded and not count_backward(done, self.clips.end_backward(self.space.params)):
            return
        if done and not done[-1].is_deferred:
            self.localizer.after_backward()
            self.clips.after_backward(self.space)
        if not is_sharded:
            self.step.weights_at = versions(self.space.params)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look into a step before the optimizer takes it; in a step with a closure, after the closure."""
        if self.engine is not None or self.is_analysing or not self._is_ours(optimizer):
            return None
        self._num_steps += 1
        if torch._C._current_graph_task_id() != -1:
            self._warn_once("the optimizer steps inside of the backward, so no gradient is whole: nothing is watched")
            return None
        with_check = call_after_closure(args, kwargs, partial(self._check_before_step, optimizer))
        if with_check is None:
            self._check_before_step(optimizer)
            if any(spike.taken == "skip" for spike in self.localizer.outcomes):
                self._withheld.take(optimizer)
        return with_check

    def _check_before_step(self, optimizer: Any) -> None:
        """Check the step, unless :meth:`clip_grad_norm_` has, and notice a loop that shows nothing to the taps."""
        if self.engine is not None:
            self._num_steps += 1
        else:
            self.follow(optimizer)
        if not self._is_checked:  # else the ranks would meet once more, for nothing
            self.check_step()
        self._is_checked = False
        if self._num_steps == 1 and not self.tap.num_seen:
            self.tap.listen_to_methods()
        if not self._num_checked and optimizer is self.optimizer:
            self.number += 1
        if self._num_steps == _EARLY and not self._num_checked:
            self._warn_once(self._why_nothing())

    def _why_nothing(self) -> str:
        why = "the model's forward had no gradients, or torch.func's alone; pass the model that the loop calls"
        if self.tap.num_seen:
            why = (
                "no backward() came to a last hidden state (torch.autograd.grad is not seen); name the module that it "
                'is the output of, as gradloc.Watch(model, hidden="model.norm")'
            )
        return (
            f"nothing could be watched in {_EARLY} optimizer steps: {why}. A model that is compiled in place with "
            "fullgraph=True, or checkpointed as a whole with use_reentrant=True, shows nothing: compile its layers, "
            "checkpoint with use_reentrant=False"
        )

    def _is_ours(self, optimizer: Any) -> bool:
        if self.optimizer is optimizer:
            return True
        ours = {id(param) for param in self.tap.outer.parameters()}
        return any(id(param) in ours for group in optimizer.param_groups for param in group["params"])

    def _settle_outer(self) -> None:
        """Check at the first step that the model is shared over processes as a search needs it."""
        if self._num_checked > 1:
            return
        outer = self.tap.outer
        is_wrapped = isinstance(outer, DistributedDataParallel | FSDP1 | FSDPModule)
        why = ""
        if self.engine is None and self.ranks.num_processes > 1 and not is_wrapped:
            why = (
                f"with {self.ranks.num_processes} processes the model has to be in DDP or FSDP, found a "
                f"{type(outer).__name__}"
            )
        elif isinstance(outer, DistributedDataParallel) and outer.gradient_as_bucket_view:
            why = f"DistributedDataParallel's gradient_as_bucket_view must be {_NO_VIEWS}, found True"
        if why:
            self._warn_once(f"{why}. Nothing is watched")
            self.localizer.switch_off()

    def _drop(self) -> None:
        """Drop what was recorded of a gradient when the loop drops the gradient."""
        if self.step is None or not any(each.is_done for each in self.tap.forwards):
            return
        self.tap.forwards = [each for each in self.tap.forwards if not each.is_done]
        self.clips.pending.clear()
        self.localizer.begin_mini_batch(self.step)

    def _drop_what_is_gone(self) -> None:
        """Drop what was recorded where no ``.grad`` remains, as after the model's own ``zero_grad``."""
        done = [each for each in self.tap.forwards if each.is_done]
        is_elsewhere = isinstance(self.tap.outer, FSDP1) or (
            isinstance(self.tap.outer, FSDPModule) and any(each.is_deferred for each in done)
        )
        if done and not is_elsewhere and self.engine is None and all(param.grad is None for param in self.space.params):
            self._drop()

    def _write_metrics(self, norm: torch.Tensor) -> None:
        self.metrics = {name.removeprefix("actor/"): value for name, value in self.metrics.items()}
        if self.metrics and self._curve is not None:
            self._warn_once(self._curve.write(self.number, {"actor/grad_norm": float(norm), **self.metrics}))


def _to(reference: Any, name: str, *given: Any) -> Any:
    watch = reference()
    return None if watch is None else getattr(watch, name)(*given)
