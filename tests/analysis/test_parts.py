# SPDX-License-Identifier: Apache-2.0
"""Parts of a bare step's gradient and tried updates, against a backward of every token and a copy's own step.

Shapes: R rows, T positions.
"""

import copy
import math
from unittest import mock

import numpy as np
import pytest
import torch

from gradloc.analysis.parts import (
    BUCKET_KEY,
    NUM_BUCKETS_KEY,
    NUM_SAMPLED_KEY,
    QUARTILE_KEY,
    SAMPLE_KEY,
    Analysed,
    Parts,
    measure,
)
from gradloc.analysis.quartiles import UPDATES, assign, sample_tokens
from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from tests.toy_model import Loss, Oracle, ToyStep, build, clip_gradient, log_prob_of, random_batch

M, NUM_TOKENS = 4, 6
TERMS = Loss(entropy=0.05, kl=0.3)


class Run:
    """A model with an optimizer that has taken some steps, and the next batch, whose quartiles are known."""

    def __init__(self, loss=TERMS, num_before=0, lr=1e-3, edit=lambda batch: batch):
        self.model, self.loss = build("tiny"), loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        for seed in range(1, num_before + 1):
            step = ToyStep(self.model, random_batch(self.model, rows=8, seed=seed), M, loss=loss)
            step.train()
            clip_gradient(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.batch = edit(random_batch(self.model, rows=8))
        mask = self.batch.mask.numpy()
        self.quartiles = assign(self.batch.old_log_probs.numpy(), mask, "quantile")
        self.sampled = sample_tokens(self.quartiles, NUM_TOKENS, seed=1)

    def measure(self):
        """Return the workers' answer about the quartiles."""
        numbers = torch.full(self.quartiles.shape, -1)
        for number, place in enumerate(map(tuple, self.sampled)):
            numbers[place] = number
        known = {QUARTILE_KEY: torch.from_numpy(self.quartiles), SAMPLE_KEY: numbers}
        return self.ask(known, {NUM_SAMPLED_KEY: len(self.sampled)})

    def ask(self, known, request):
        """Return the workers' answer to this request, with these labels of the rows."""
        step, ranks = ToyStep(self.model, self.batch, M, loss=self.loss), Ranks()
        step.train()
        self.optimizer.zero_grad()
        space = GradientSpace(self.model, ranks)
        made = Analysed(
            step,
            lambda name, index: known[name][step.rows(index)],
            space,
            ranks,
            self.optimizer,
            lambda: clip_gradient(self.model, 1.0),
            1.0,
        )
        return measure(lambda: made, space, request)

    def places_in(self, *quartiles):
        return [tuple(place) for place in np.argwhere(np.isin(self.quartiles, quartiles)).tolist()]

    def log_probs(self, model=None):
        """The response's log-probs, (R, T)."""
        logits = (model or self.model)(self.batch.tokens, self.batch.labels.shape[1])
        return log_prob_of(logits, self.batch.labels)


def norm_of(grads):
    return float(torch.cat([grad.detach().flatten() for grad in grads]).norm())


def test_each_buckets_part_of_each_term_agrees_with_a_backward_of_its_tokens():
    run, buckets = Run(Loss(kl=0.3)), torch.tensor([0, 2, 1, 1, 2, 2, 0, 2])
    found = run.ask({BUCKET_KEY: buckets}, {NUM_BUCKETS_KEY: 3})
    task, both = Oracle(run.model, run.batch), Oracle(run.model, run.batch, run.loss)
    everything = torch.ones_like(buckets, dtype=torch.bool)
    for number, inside in enumerate([*(buckets == each for each in range(3)), everything]):
        places = [tuple(place) for place in (run.batch.mask & inside.unsqueeze(1)).nonzero().tolist()]
        of_task, of_both = task.gradient(places), both.gradient(places)
        of_kl = of_both - of_task
        norms = {"task": float(of_task.norm()), "kl": float(of_kl.norm())}
        assert found["norms"][number] == pytest.approx(norms, rel=1e-4)
        assert found["dots"][number]["task_kl"] == pytest.approx(float(of_task @ of_kl), rel=1e-3, abs=1e-7)
        if number < 3:
            assert found["weights"][number] == pytest.approx([len(places) / run.batch.num_tokens] * 2)


@pytest.mark.parametrize("loss", [Loss(), TERMS], ids=["task", "entropy and KL"])
def test_each_quartile_and_token_agrees_with_a_backward_of_every_token(loss):
    run = Run(loss)
    found, oracle = run.measure(), Oracle(run.model, run.batch, loss)
    whole, parts = oracle.gradient(), [oracle.gradient(run.places_in(number)) for number in range(4)]
    assert found["whole"] == pytest.approx(float(whole.norm()), rel=1e-5) and found["closure"] < 1e-5
    assert found["norms"] == pytest.approx([float(part.norm()) for part in parts], rel=1e-5)
    assert found["dots"] == pytest.approx([float(part @ whole) for part in parts], rel=1e-4)
    assert len(found["tokens"]) == NUM_TOKENS
    log_probs, params = run.log_probs(), list(run.model.parameters())
    for place, token in zip(map(tuple, run.sampled.tolist()), found["tokens"], strict=True):
        assert token["loss_norm"] == pytest.approx(oracle.norm(place), rel=1e-4)
        norm = norm_of(torch.autograd.grad(log_probs[place], params, retain_graph=True))
        assert token["log_prob_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("num_before", [0, 2])
def test_tried_updates_are_those_of_a_literal_copy_of_model_and_optimizer(num_before):
    run = Run(num_before=num_before)
    found, oracle, before = run.measure(), Oracle(run.model, run.batch, TERMS), run.log_probs().detach()
    read = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in found["log_probs"].items()}
    mask = run.batch.mask
    torch.testing.assert_close(read["before"][mask], before[mask])
    for name, quartiles in UPDATES.items():
        twin, optimizer = copy.deepcopy((run.model, run.optimizer))
        places = run.places_in(*quartiles)
        gradient = oracle.gradient(places).float() if places else torch.zeros(sum(p.numel() for p in twin.parameters()))
        sizes = [param.numel() for param in twin.parameters()]
        for param, grad in zip(twin.parameters(), gradient.split(sizes), strict=True):
            param.grad = grad.view_as(param).clone()
        step, norm = found["steps"][name], float(clip_gradient(twin, 1.0))
        optimizer.step()
        moved = norm_of([new - old for new, old in zip(twin.parameters(), run.model.parameters(), strict=True)])
        change, ours = ((each.exp() - before.exp())[mask] for each in (run.log_probs(twin).detach(), read[name]))
        assert step.is_taken and step.grad_norm == pytest.approx(norm, rel=1e-4)
        assert step.update_norm == pytest.approx(moved, rel=1e-2)
        # without a past, a gradient of zero leaves weight decay alone: next to nothing
        assert (change.abs().max() > 1e-5) == (name != "none" or num_before > 0)
        assert (ours - change).abs().max() < max(0.01 * float(change.abs().max()), 1e-6)


def test_a_tried_update_that_fails_is_taken_back():
    run, read, moved = Run(num_before=1), Parts._log_probs, []
    weights = [param.detach().clone() for param in run.model.parameters()]
    moments = copy.deepcopy(run.optimizer.state_dict()["state"])

    def read_once(parts):
        moved.append(not all(map(torch.equal, weights, run.model.parameters())))
        if len(moved) > 1:
            raise ZeroDivisionError("not today")
        return read(parts)

    with mock.patch.object(Parts, "_log_probs", read_once), pytest.raises(ZeroDivisionError):
        run.measure()
    assert moved == [False, True] and all(map(torch.equal, weights, run.model.parameters()))
    for number, state in run.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[number][name]) for name, value in state.items())


def largest_changes(found):
    """Return the largest change of a token's log-prob, by update; None where no step was taken."""
    before, taken = found["log_probs"]["before"], found["log_probs"]
    return {
        name: None if after is None else max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))
        for name, after in taken.items()
        if name != "before"
    }


def test_a_broken_token_spoils_its_quartile_and_no_other():
    def broken(batch):
        lowest = batch.old_log_probs.masked_fill(~batch.mask, 1.0)
        return batch.planted({divmod(int(lowest.argmin()), lowest.shape[1]): math.nan})

    found = Run(edit=broken).measure()
    assert math.isnan(found["norms"][0]) and all(norm > 0 for norm in found["norms"][1:])
    assert not found["steps"]["lowest"].is_taken and not found["steps"]["all"].is_taken
    changes = largest_changes(found)
    assert changes["lowest"] is changes["all"] is None and changes["highest"] > 0


def kept(batch, places):
    mask = torch.zeros_like(batch.mask)
    mask[tuple(zip(*places, strict=True))] = True
    return batch.edited(mask=mask)


@pytest.mark.parametrize(
    ("edit", "is_filled"),
    [
        (lambda batch: batch.edited(old_log_probs=torch.full_like(batch.old_log_probs, -1.0)), [1, 0, 0, 0]),
        (lambda batch: kept(batch, [(0, 0), (5, 0), (7, 0)]), [1, 1, 1, 0]),
    ],
    ids=["all equally probable", "fewer than four tokens"],
)
def test_an_empty_quartile_is_reported_as_empty(edit, is_filled):
    run = Run(edit=edit)
    found = run.measure()
    assert [bool(run.places_in(number)) for number in range(4)] == [norm > 0 for norm in found["norms"]] == is_filled
    assert found["steps"]["highest"] is None and found["steps"]["lowest"].is_taken and found["closure"] < 1e-5


def test_a_learning_edit_zero_changes_nothing_at_all():
    found = Run(lr=0.0).measure()
    assert found["learning_rate"] == 0 and set(largest_changes(found).values()) == {0.0}
