# SPDX-License-Identifier: Apache-2.0
"""Scenarios about the probes themselves: do they add up, do shares, is a masked step right."""

import contextlib
import copy
from typing import Any
from unittest import mock

import torch

from tests.world import harness
from tests.world.harness import local_of, make_batch, make_trainer, part, step_class
from tests.world.settings import require
from tests.world.spikes import ON, plant

FORCE = ["actor_rollout_ref.actor.gradloc.trigger.force_step=1"]


@contextlib.contextmanager
def instead_of_localizing(measure):
    """Run ``measure`` where the localizer would search, and collect what it returns."""
    Localizer, Prober = part("loop.localizer").Localizer, part("core.probe").Prober
    results = []

    def look_into(hook, policy, spike, grad_norm, is_written):
        saved = hook._space.take()
        clip = 1.0 if hook.trainer.is_unclipped else min(1.0, hook.trainer.clip_limit / (spike.grad_norm + 1e-6))
        results.append(measure(hook, saved, clip, Prober(hook._step, hook._space, hook.ranks), spike))
        hook._space.put(saved)
        return grad_norm

    with mock.patch.object(Localizer, "_look_into", look_into):
        yield results


def cover_error(overrides: list[str], dump_dir: str, noise: float = 0.3) -> dict[str, Any]:
    """Relative error of the sum over a random disjoint three-way cover of the tokens."""

    def measure(hook, saved, clip, prober, spike):
        step = prober.step
        parts = [torch.randint(0, 3, step.token_mask(i).shape) for i in range(step.num_micro_batches)]
        total, norms = None, []
        for third in range(3):
            prober.compute((i, parts[i] == third) for i in range(step.num_micro_batches))
            norms.append(prober.space.norm())
            found = prober.space.take()
            prober.space.put(total if total is not None else [None] * len(found))
            prober.space.add(found)
            total = prober.space.take()
        prober.space.put(total)
        prober.space.add(saved, alpha=-1.0 / clip)
        return {"error": prober.space.norm() / spike.grad_norm, "parts": norms}

    with instead_of_localizing(measure) as results:
        trainer = make_trainer(ON + FORCE + overrides, dump_dir)
        batch = make_batch(noise=noise)
        batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + 0.01
        trainer.update(batch)
    return results[0]


def rows_alone(overrides: list[str], dump_dir: str, dropout: float = 0.0) -> dict[str, Any]:
    """The backward of a token in the first rank's second row, where that may run alone and where it may not: how far
    apart they are, which rows ran, and how far the whole step, run again, then is from training's. Without dropout it
    is not asked whether they come out as in training: some processors' kernels go by the shape."""

    require(issubclass(step_class(), part("core.step").ByRow), "its forward of a micro-batch comes whole")

    def measure(hook, saved, clip, prober, spike):
        step = hook._step
        first_row = hook.ranks.gather(int(step.token_mask(1)[0].sum()))[0]
        tokens, ran = [part("core.selection").Token(1, 0, first_row + 1)], []

        def forward_rows(rows: list[tuple[int, list[int]]]) -> Any:
            ran.extend(rows)
            return type(step).forward_rows(step, rows)

        if not dropout:
            prober._are_trainings = lambda *_: True
        with mock.patch.object(step, "forward_rows", forward_rows):
            prober.compute_only(tokens, [1])
            alone = prober.space.take()
            prober.compute_only(tokens, [1], factor=-1.0)
        norm, forwards = prober.space.norm(), prober.num_forwards
        prober._is_by_row = False
        prober.compute_only(tokens, [1])
        prober.space.add(alone, alpha=-1.0)
        error = prober.space.norm() / norm
        prober.compute_without([])
        prober.space.add(saved, alpha=-1.0 / clip)
        return {"error": error, "ran": ran, "forwards": forwards, "again": prober.space.norm() / spike.grad_norm}

    with instead_of_localizing(measure) as results:
        make_trainer(ON + FORCE + overrides, dump_dir, dropout=dropout).update(make_batch())
    return results[0]


def forward_size(overrides: list[str], dump_dir: str) -> dict[str, float]:
    """The bytes that the step says a forward of its own holds, and those of its largest micro-batch's logits."""
    batch = make_batch()
    lengths = batch.batch["attention_mask"].sum(1)

    def measure(hook, *_):
        step = hook._step
        tokens = max(int(lengths[step.rows(index)].sum()) for index in range(step.num_micro_batches))
        return {"bytes": step.forward_bytes(), "of_logits": 4 * harness.VOCABULARY * tokens}

    with instead_of_localizing(measure) as results:
        trainer = make_trainer(ON + FORCE + overrides, dump_dir)
        require(trainer.has_logits, "its forward never has all logits")
        trainer.update(batch)
    return results[0]


def share_identities(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """Closure, and the sums of shares by rank, micro-batch and sequence, on a planted spike."""
    measurement, task_of = part("search.share").ShareMeasurement, part("search.task")

    def measure(hook, saved, clip, prober, spike):
        before = [local_of(param).clone() for param in prober.space.params]
        task = task_of.Task(
            prober, saved, clip, spike, 1.0, 8, part("search.limit").Limit(prober.step.num_micro_batches, 4)
        )
        given = prober, task.readouts([]), saved, clip, range(prober.step.num_micro_batches)
        shares = measurement(*given).run()
        after = [local_of(param) for param in prober.space.params]
        by_micro_batch = [
            hook.ranks.sum([float(shares.shares(i).sum())])[0] for i in range(prober.step.num_micro_batches)
        ]
        sequences = sum(float(shares.shares(i).sum(-1).sum()) for i in range(prober.step.num_micro_batches))
        top = max(float(shares.shares(i).max()) for i in range(prober.step.num_micro_batches))
        log_prob = prober.forward(0).log_prob
        return {
            "closure": shares.closure,
            "is_trusted": shares.is_trusted,
            "by_micro_batch": by_micro_batch,
            "by_rank": hook.ranks.gather(sequences),
            "top": hook.ranks.max([top])[0],
            "weights_restored": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "log_prob_drift": float((log_prob - prober.step.recorded(0).log_prob).abs().max()),
            "forwards": prober.num_forwards,
        }

    with instead_of_localizing(measure) as results:
        trainer = make_trainer(ON + FORCE + overrides, dump_dir)
        batch = make_batch()
        plant(batch, 5, 3, -1e4)
        plant(batch, 12, 2, -3e3)
        trainer.update(batch)
    return results[0]


def collectives_of_a_step(overrides: list[str], dump_dir: str) -> int:
    """How many collectives one healthy update calls on this rank, as torch's profiler sees them; not those of the
    harness, which hears of the ranks' reports by a gather where verl's worker group goes through Ray.
    """
    trainer, asked = make_trainer(overrides, dump_dir), []
    require(trainer.has_driver, "its processes are all alike, and send small messages")
    trainer.update(make_batch(seed=1))
    gather = harness.everyones

    def counted(value: Any) -> Any:
        asked.append(value)
        return gather(value)

    with mock.patch.object(harness, "everyones", counted):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.update(make_batch(seed=2))
    found = sum(event.name.startswith(("c10d::", "_c10d_functional::")) for event in profile.events())
    return found - 2 * len(asked)  # lengths, then objects


def own_loss(overrides: list[str], dump_dir: str, edits: dict[str, list[tuple[int, int, float]]]) -> dict[str, float]:
    """How far what the step's own loss gives, asked without a forward, is from what the backward of training leaves.

    Args:
        overrides: the run's.
        edits: of a tensor of the batch, (row, position, value): the loss is asked of these tensors in place of its own,
            and held against another run whose batch has them.

    Returns:
        ``is_same``: whether ``recorded_under`` is that record, bit for bit; ``error``: the largest difference of
        ``coefficients_under`` over the largest coefficient; ``changed``: likewise, how far the other run's coefficients
        are from the run's own; ``size``: the largest coefficient.
    """
    require(issubclass(step_class(), part("core.step").LossReplay), "its loss cannot be asked")
    names = getattr(harness.adapter(), "NAMES", {})
    off_policy = any(override.endswith("ppo_epochs=2") for override in overrides)
    batch, other = (make_batch(noise=0.6) for _ in range(2))
    for edited in (batch, other):
        if off_policy:
            edited.batch["rollout_log_probs"] = edited.batch["old_log_probs"] + 0.01
    for name, places in edits.items():
        for row, position, value in places:
            other.batch[name][row, position] = value

    def asked(hook, saved, clip, prober, spike):
        step, exact, precise = hook._step, [], []
        for index in range(step.num_micro_batches):
            tensors = {names.get(name, name): other.batch[name][step.rows(index)] for name in edits}
            exact += step.recorded_under(index, {}, tensors).coefficients(step.weight)
            precise += [each / hook.ranks.size for each in step.coefficients_under(index, {}, tensors)[:2]]
        return exact, precise

    def left(hook, saved, clip, prober, spike):
        step = hook._step
        found = (step.recorded(i).coefficients(step.weight) for i in range(step.num_micro_batches))
        return [each for pair in found for each in pair]

    def measured(measure, batch):
        with instead_of_localizing(measure) as results:
            make_trainer(ON + FORCE + overrides, dump_dir).update(copy.deepcopy(batch))
        return results[0]

    def distance(one, two):
        return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True) if a is not None) / size

    own, (exact, precise) = measured(lambda *given: (left(*given), asked(*given)), batch)
    wanted = measured(left, other)
    size = max(float(each.abs().max()) for each in wanted if each is not None)
    is_same = all(torch.equal(a, b) for a, b in zip(exact, wanted, strict=True) if a is not None)
    return {
        "is_same": is_same,
        "error": distance(precise, wanted),
        "changed": distance(own, wanted),
        "size": size,
    }
