# SPDX-License-Identifier: Apache-2.0
"""A matrix of spikes against causes: each kind of spike gets its own cause, its near neighbours theirs."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from gradloc.explain.causes import classify
from gradloc.record import CAUSES, BatchStatistics
from tests.explain import a_culprit
from tests.toy_model import Amplified, Batch, Decoder, Loss, Oracle, ToyStep, build, random_batch
from tests.toy_model.events import event_of
from tests.toy_model.noise import unrepeatable
from tests.toy_model.routers import Overflow, add_router_loss

pytestmark = pytest.mark.full

THRESHOLD = 20.0  # healthy norms are near 1
PLACE, ROW = (3, 2), 3
SURE = 40.0  # times the head's weights: the model is then nearly sure of most tokens


@dataclass
class Case:
    """A model, a batch, and what happens to them."""

    model: Decoder
    batch: Batch
    loss: Loss = Loss()
    threshold: float = THRESHOLD
    seen_by_loss: Batch | None = None
    """Where the actor's loss knows more than the driver's batch."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``event_of``."""

    def step(self, batch: Batch | None = None) -> ToyStep:
        return ToyStep(self.model, batch or self.seen_by_loss or self.batch, 4, loss=self.loss)


def plain(**extra: Any) -> Case:
    model = build("tiny")
    return Case(model, random_batch(model), extra=extra)


def planted(size: float = 1e4, places=(PLACE,), **extra: Any) -> Case:
    case = plain(**extra)
    case.batch = case.batch.planted({place: size for place in places})
    return case


def typical(case: Case, times: float = 1.0) -> Case:
    """With a history whose coefficients are those of the healthy batch, times this."""
    case.extra["typical"] = {"coefficient": (times / case.batch.num_tokens, 3.0)}
    return case


def scaled(factor: float, known: float = 1.0) -> Case:
    case = even(plain())
    case.batch = case.batch.edited(advantages=case.batch.advantages * factor)
    return typical(case, known)


def drifted(rows: slice, positions: slice, **loss: float) -> Case:
    """The old policy gave these tokens e**-9 times the probability that they have now."""
    case = plain()
    case.loss = Loss(**loss)
    old, advantages = case.batch.old_log_probs.clone(), case.batch.advantages.clone()
    old[rows, positions] -= 9.0
    advantages[rows, positions] = -1.0  # PPO's clip lets a ratio grow where the advantage is negative
    case.batch = case.batch.edited(old_log_probs=old, advantages=advantages)
    return case


def weighted(weight: float, advantage: float) -> Case:
    """One token with a weight of the rollout correction: the actor's loss holds the product."""
    case = planted(advantage)
    weights = torch.ones_like(case.batch.advantages)
    weights[PLACE] = weight
    case.seen_by_loss = case.batch.edited(advantages=case.batch.advantages * weights)
    case.extra["of_rollout"] = {"rollout_is_weights": weights}
    return case


def written(case: Case, log_prob: float | None = None, shift: int = 0, place: tuple[int, int] = PLACE) -> Case:
    """The rollout's log-probs: the old ones with 2 % of noise; one token's replaced, or all rows' shifted."""
    old = case.batch.old_log_probs
    found = (old * (1 + 0.02 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0)))).roll(shift, 1)
    if log_prob is not None:
        found[place] = log_prob
    case.extra["of_rollout"] = {**case.extra.get("of_rollout", {}), "rollout_log_probs": found}
    return case


def appended(case: Case, log_prob: float | None = None) -> Case:
    """The batch's unlikeliest token has another log-prob of the rollout; None: 2 above the trainer's."""
    old = case.batch.old_log_probs.masked_fill(~case.batch.mask, 0.0)
    place = divmod(int(old.argmin()), old.shape[1])
    return written(case, float(old[place]) + 2 if log_prob is None else log_prob, place=place)


def pulled(distance: float, advantage: float | None = None) -> Case:
    """The reference policy gave one token e**-distance times its probability; the KL term is on."""
    case = plain() if advantage is None else planted(advantage)
    case.loss = Loss(kl=1.0)
    reference = case.batch.old_log_probs.clone()
    reference[PLACE] -= distance
    case.batch = case.batch.edited(reference_log_probs=reference)
    return case


def amplified(layers: tuple[int, ...], has_history: bool) -> Case:
    case = plain()
    healthy = case.batch
    case.batch = healthy.edited(amplified=Amplified(layers, ROW, 8, 1e4))
    if has_history:
        batches = [random_batch(case.model, seed=seed) for seed in range(3)]
        case.extra["history"] = [case.step(batch) for batch in batches]
    return case


def even(case: Case) -> Case:
    """With advantages of 1 and -1, so that none stands out."""
    case.batch = case.batch.edited(advantages=case.batch.advantages.sign())
    return case


def unlikely(is_rewarded: bool, is_sure: bool) -> Case:
    """One token of a probability under 0.005, where the model was sure of another or was not; all others are likely."""
    case = even(plain())
    with torch.no_grad():
        case.model.head.weight *= SURE
    oracle = Oracle(case.model, case.batch)
    rows = [oracle.row_logits(row).log_softmax(-1) for row in range(len(case.batch.labels))]
    log_probs = {
        (row, position): values for row, by_position in enumerate(rows) for position, values in enumerate(by_position)
    }
    labels, old = case.batch.labels.clone(), case.batch.old_log_probs.clone()
    for place, values in log_probs.items():
        labels[place], old[place] = values.argmax(), values.max()
    likely = case.batch.edited(labels=labels.clone(), old_log_probs=old.clone())
    entropies = {place: float(-(log_probs[place].exp() * log_probs[place]).sum()) for place in log_probs}
    place = sorted((place for place in log_probs if case.batch.mask[place]), key=entropies.get)[0 if is_sure else -1]
    values = log_probs[place]
    labels[place] = values.masked_fill(values > math.log(0.005), -math.inf).argmax()
    old[place] = values[labels[place]]
    advantages = case.batch.advantages.clone()
    advantages[place] = 1.0 if is_rewarded else -1.0
    case.batch = likely.edited(labels=labels, old_log_probs=old, advantages=advantages)
    without, norm = (float(Oracle(case.model, batch).gradient().norm()) for batch in (likely, case.batch))
    case.threshold = (norm * without) ** 0.5
    return case


def unremarkable() -> Case:
    """A threshold that a healthy step is over."""
    case = even(plain())
    case.threshold = 0.7 * float(Oracle(case.model, case.batch).gradient().norm())
    return case


def broken(way: str) -> Case:
    """In one row the last block gives NaN from a position on, or the first block's gradient overflows."""
    case, seen = plain(), []
    wanted = case.batch.tokens[ROW]

    def spoil(block, inputs, output):
        is_row = (seen[-1] == wanted).all(-1)[:, None, None]
        if way == "backward":
            return torch.where(is_row, Overflow.apply(output), output)
        return output.masked_fill(is_row & (torch.arange(len(wanted))[:, None] >= 8), math.nan)

    case.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]))
    case.model.blocks[-1 if way == "forward" else 0].register_forward_hook(spoil)
    return case


def spoiled(case: Case) -> Case:
    with torch.no_grad():
        case.model.blocks[1].mlp.up.weight[5, 7] = math.nan
    return case


def with_padding(case: Case) -> Case:
    """A NaN beside the mask."""
    row, position = (~case.batch.mask).nonzero()[3].tolist()
    case.batch = case.batch.planted({(row, position): math.nan})
    return case


def with_router(case: Case, factor: float) -> Case:
    add_router_loss(case.model, factor)
    return case


def corrupted(case: Case) -> Case:
    def corrupt(space):
        space.params[3].grad.view(-1)[11] = 1e5

    case.extra["corrupt"] = corrupt
    return case


def unsteady(case: Case) -> Case:
    factors = itertools.count(1)
    case.model.head.weight.register_hook(lambda grad: grad * 1e4 / next(factors) ** 3)
    return case


def scaled_on_its_way(case: Case) -> Case:
    case.model.head.weight.register_hook(lambda grad: grad * 1e4)
    return case


def with_entropy(case: Case, factor: float) -> Case:
    case.loss = Loss(entropy=factor)
    return case


def noisy(case: Case) -> Case:
    case.extra["is_noisy"] = True
    return case


WHOLE_ROW = [(ROW, position) for position in range(12)]
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "an advantage of 1e4": (planted, "extreme_advantage"),
    "the same, run again": (lambda: planted(reruns=True), "extreme_advantage"),
    "the same, kernels that do not repeat": (lambda: noisy(planted()), "extreme_advantage"),
    "the same twice": (lambda: planted(places=(PLACE, (9, 1))), "extreme_advantage"),
    "the same in a batch of 2.5 times the run's scale": (lambda: typical(planted(), 0.4), "extreme_advantage"),
    "the same beside an entropy term": (lambda: with_entropy(planted(), 0.1), "extreme_advantage"),
    "the same beside a KL term": (lambda: pulled(0.1, advantage=1e4), "extreme_advantage"),
    "the same with a weight of 1.5": (lambda: weighted(1.5, 1e4), "extreme_advantage"),
    "the same beside a router's loss of no account": (lambda: with_router(planted(), 1e-3), "extreme_advantage"),
    "a whole response of 1e4": (lambda: planted(places=WHOLE_ROW), "extreme_advantage"),
    "an old log-prob 9 too low": (lambda: drifted(slice(ROW, ROW + 1), slice(2, 3)), "token_mismatch"),
    "such a token beside a KL term": (lambda: drifted(slice(ROW, ROW + 1), slice(2, 3), kl=0.1), "token_mismatch"),
    "a whole response 9 too low": (lambda: drifted(slice(ROW, ROW + 1), slice(None)), "sequence_mismatch"),
    "a weight of 1e4": (lambda: weighted(1e4, 1.0), "is_weight"),
    "a reference log-prob 1e4 lower": (lambda: pulled(1e4), "kl_term"),
    "an entropy term of 3000": (lambda: with_entropy(plain(), 3e4), "entropy_term"),
    "all layers react 1e4 times": (lambda: amplified((0, 1), has_history=False), "large_jacobian"),
    "one layer reacts 1e4 times": (lambda: amplified((1,), has_history=True), "layer_heterogeneity"),
    "an unlikely token, punished": (lambda: unlikely(is_rewarded=False, is_sure=True), "low_probability"),
    "an unlikely token, the model unsure": (lambda: unlikely(is_rewarded=True, is_sure=False), "low_probability"),
    "an unlikely token, rewarded": (lambda: unlikely(is_rewarded=True, is_sure=True), "spurious_token"),
    "such a token, its log-prob shifted": (lambda: written(unlikely(True, True), shift=1), "shifted_log_probs"),
    "the same the other way": (lambda: written(unlikely(True, True), shift=-1), "shifted_log_probs"),
    "such a token with a log-prob of the rollout": (lambda: written(unlikely(False, True)), "low_probability"),
    "such a token that was appended": (lambda: appended(unlikely(False, True), 0.0), "not_sampled"),
    "such a token, retokenized": (lambda: appended(unlikely(False, True), -0.1), "not_sampled"),
    "such a token, the engine 2 off": (lambda: appended(unlikely(False, True)), "low_probability"),
    "an appended token with an advantage of 1e4": (lambda: written(planted(), 0.0), "extreme_advantage"),
    "a weight of 1e4 where the rollout says -25": (lambda: written(weighted(1e4, 1.0), -25.0), "not_sampled"),
    "a weight of 1e4 where it says -8": (lambda: written(weighted(1e4, 1.0), -8.0), "is_weight"),
    "a NaN advantage": (lambda: planted(math.nan), "non_finite"),
    "a NaN advantage and one beside the mask": (lambda: with_padding(planted(math.nan)), "non_finite"),
    "a NaN beside the mask": (lambda: with_padding(plain()), "non_finite_padding"),
    "a forward that breaks": (lambda: broken("forward"), "non_finite_forward"),
    "a backward that breaks": (lambda: broken("backward"), "non_finite_backward"),
    "a NaN weight": (lambda: spoiled(plain()), "non_finite_weights"),
    "a NaN weight and a NaN advantage": (lambda: spoiled(planted(math.nan)), "non_finite_weights"),
    "a NaN weight and a forward that breaks": (lambda: spoiled(broken("forward")), "non_finite_weights"),
    "a batch of 1e4 times the run's scale": (lambda: scaled(1e4), "batch_scale"),
    "a batch of 1e4 in a run of 1e4": (lambda: scaled(1e4, known=1e4), "unknown"),
    "a router's loss": (lambda: with_router(plain(), 3e4), "not_tokens"),
    "a gradient scaled on its way": (lambda: scaled_on_its_way(plain()), "not_tokens"),
    "a router's loss, run again": (lambda: with_router(plain(reruns=True), 3e4), "not_tokens"),
    "a gradient element that no computation gives": (lambda: corrupted(plain()), "gradient_changed"),
    "such an element, run again": (lambda: corrupted(plain(reruns=True)), "gradient_changed"),
    "another gradient each time": (lambda: unsteady(plain(reruns=True)), "transient"),
    "a threshold that a healthy step is over": (unremarkable, "unknown"),
}


FIRST = {"a forward that breaks": ("blocks.1", "forward"), "a backward that breaks": ("blocks.0.mlp.down", "backward")}
"""The module that is named where the model's own numbers are not finite."""


@pytest.mark.parametrize("name", CASES)
def test_a_spike_has_the_cause_of_its_kind_and_no_other_and_names_the_module_that_is_not_finite(name):
    make, cause = CASES[name]
    case = make()
    is_noisy = case.extra.pop("is_noisy", False)
    hooks = [len(module._forward_hooks) for module in case.model.modules()]
    with unrepeatable(case.model, 0.1 if is_noisy else 0.0):
        event = event_of(case.step(), case.batch, case.threshold, **case.extra)
    print(f"{name}: {event.cause.label} ({len(event.culprits)} culprits) {event.verdict}")
    assert event.cause.label == cause, "no culprit: make the row louder, or lower the threshold" * (not event.culprits)
    if event.culprits and cause != "not_tokens":
        assert {culprit.cause.label for culprit in event.culprits} == {cause}
    first = event.first_not_finite
    assert (first and (first.module, first.way)) == FIRST.get(name)
    assert first is None or len(first.before) == 3 and all(0 < size < 1e3 for size in first.before.values())
    assert [len(module._forward_hooks) for module in case.model.modules()] == hooks


def test_every_cause_is_in_the_matrix():
    # The critic's and the teacher's have tests of their own, below; replicas take several ranks, see tests/adapters.
    elsewhere = {"value_outlier", "teacher_gap", "replicas_differ"} | OF_DOCUMENTS  # these in tests/watch/test_words.py
    elsewhere |= OF_UPDATES  # in tests/fault
    assert {cause for _, cause in CASES.values()} | elsewhere == set(CAUSES)


OF_DOCUMENTS = {"loss_weight", "unexpected_token", "odd_document", "duplicate_document", "shifted_labels"}
OF_DOCUMENTS |= {"padding_trained", "non_finite_input"}
OF_UPDATES = {"gradient_scaled", "update_too_large", "learning_rate_jumped", "weight_decay", "second_moments"}
OF_UPDATES |= {"moments_lost", "weights_changed", "weights_grown"}
SPURIOUS = a_culprit(log_prob=math.log(0.001), entropy=0.2, advantage=1.0, coefficient=-0.01)


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "spurious_token"),
        ({"log_prob": math.log(0.02)}, "unknown"),
        *(({"entropy": of}, "unknown") for of in (0.5, None)),
        ({"advantage": -1.0}, "unknown"),
        ({"advantage": 4.0}, "extreme_advantage"),
        ({"is_weight": 4.0}, "is_weight"),
        ({"old_log_prob_used": math.log(0.0001)}, "token_mismatch"),
    ],
)
def test_a_spurious_token_is_unlikely_where_the_model_was_sure_and_rewarded(change, label):
    """As STAPO has it (arXiv 2602.15620)."""
    batch = BatchStatistics(advantage=1.0, one_minus_prob=0.5, jacobian=1.0, low_entropy=0.3)
    assert classify(a_culprit(SPURIOUS, **change), batch).label == label
    assert classify(a_culprit(SPURIOUS, **change), replace(batch, low_entropy=None)).label != "spurious_token"


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_entropies_are_looked_up_where_they_may_name_a_cause(is_rewarded):
    case = unlikely(is_rewarded=is_rewarded, is_sure=True)
    (culprit,) = event_of(case.step(), case.batch, case.threshold, **case.extra).culprits
    assert culprit.at("log_prob") < math.log(0.01) and (culprit.at("entropy") is not None) == is_rewarded


def caused(typical, given, **changed):
    return classify(a_culprit(grad_norm=changed.pop("grad_norm", 1.0), coefficient=1.0, **given | changed), typical)


def test_a_critics_culprit_is_explained_by_its_error_or_by_the_values_own_gradient():
    cause = partial(caused, BatchStatistics(value_error=0.5, jacobian=1.0), {"value": 0.1, "value_target": 0.4})
    assert cause().label == cause(value=None).label == cause(value_target=None).label == "unknown"
    far = cause(value_target=100.1)
    assert far.label == "value_outlier" and far.numbers["error_over_typical"] == pytest.approx(200)
    assert cause(grad_norm=50.0).label == "large_jacobian"
    assert cause(value=math.nan).label == "non_finite_forward"
    assert cause(value_target=math.inf).label == "non_finite"
    assert cause(grad_norm=math.inf).label == "non_finite_backward"


def test_a_distilled_culprit_is_explained_by_its_distance_from_the_teacher_and_by_no_advantage():
    typical = BatchStatistics(advantage=0.1, teacher_gap=0.5, jacobian=1.0)
    cause = partial(caused, typical, {"log_prob": -1.0, "teacher_log_prob": -1.4})
    assert cause().label == cause(log_prob=None).label == "unknown"
    far = cause(teacher_log_prob=-21.0)
    assert far.label == "teacher_gap" and far.numbers["gap_over_typical"] == pytest.approx(40)
    assert "advantage" not in far.numbers and "advantage_over_typical" not in far.numbers
    assert cause(teacher_log_prob=-21.0, old_log_prob_used=-9.0).label == "token_mismatch", "the ratio is further off"
    assert cause(teacher_log_prob=-math.inf).label == "non_finite"
    assert cause(rollout_log_prob=0.0, log_prob=-12.0).label == "not_sampled"
