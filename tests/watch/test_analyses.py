# SPDX-License-Identifier: Apache-2.0
"""A plain loop's steps taken apart, and made in Lopti's two stages, against autograd on the model itself.

Shapes: R rows of a batch, T positions.
"""

import copy
import json

import numpy as np
import pytest
import torch

import gradloc
from gradloc.analysis.config import BucketSettings, QuartileSettings, taken_from
from gradloc.analysis.quartiles import assign
from tests.watch.loops import ROWS, Loop, batches, flat
from tests.world.events import events_in, validate

REWARDS = torch.tensor([0.0, 0, 0, 1, 0, 2, 0, 3])
"""Of four prompts' two rollouts: each later group deviates more."""
EACH_STEP = {"buckets": {"num_buckets": 2, "every": 1}, "quartiles": {"every": 1, "num_tokens": 6}}


class Policy(Loop):
    """A policy gradient on groups of two rollouts; ``without`` names what the loop does not note."""

    def __init__(self, *given, without=(), **settings):
        super().__init__(*given, **settings)
        self.without = without
        self.advantages = torch.linspace(-1.0, 2.0, ROWS)

    def loss(self, log_probs, rows, mask):
        """The surrogate, with the entropies' place taken by a penalty on sure tokens."""
        return -(log_probs * self.advantages[rows, None] * mask).sum() / 96 + 0.1 * (log_probs.exp() * mask).sum() / 96

    def micro_batches(self, ids, mask, weight, each):
        for local in torch.arange(len(ids)).split(each):
            x, rows = ids[local], local + self.rank * len(ids)
            known = {"rewards": REWARDS[rows], "advantages": self.advantages[rows]}
            known = {name: value for name, value in known.items() if name not in self.without}
            names = [str(int(row) // 2) for row in rows] if "rows" not in self.without else None
            log_probs = self.watch.log_probs(lambda x=x: self.forward(x), mask[local], x[:, 1:], names, **known)
            (self.loss(log_probs, rows, mask[local]) * self.size).backward()


def one_step(tmp_path, **given):
    """A loop after a step with both analyses, the plain model as it was before, and what both were trained on."""
    loop = Policy(tmp_path, **{**EACH_STEP, **given})
    before, (ids, mask) = copy.deepcopy(Policy().model), next(iter(batches(1)))
    loop.step(ids, mask, torch.ones_like(mask, dtype=torch.float32))
    return loop, before, ids, mask


def gradient_of(loop, model, ids, mask, chosen):
    """Of the chosen tokens' part of the whole loss, bool (R, T): others are detached."""
    model.zero_grad()
    log_probs = gradloc.token_log_probs(model(ids[:, :-1], ids.shape[1] - 1), ids[:, 1:])
    loop.loss(log_probs.where(chosen, log_probs.detach()), torch.arange(len(ids)), mask).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def record_in(tmp_path, kind):
    record = json.loads((tmp_path / "gradloc" / f"{kind}_analysis" / "step_1.json").read_text())
    validate(f"{kind}_analysis", record)
    return record


def test_buckets_are_parts_of_the_loops_own_gradient(tmp_path):
    loop, model, ids, mask = one_step(tmp_path)
    low, high, whole = record_in(tmp_path, "gradient")["buckets"]
    all_tokens = mask.bool()
    by_hand = {}
    for bucket, rows in ((low, slice(0, 4)), (high, slice(4, 8)), (whole, slice(0, 8))):
        inside = torch.zeros_like(all_tokens)
        inside[rows] = all_tokens[rows]
        by_hand[bucket["name"]] = part = gradient_of(loop, model, ids, mask, inside)
        weight = float(inside.sum() / all_tokens.sum())
        assert bucket["weight"]["task"] == pytest.approx(weight)
        assert bucket["norm"]["task"]["part"] == pytest.approx(float(part.norm()), rel=1e-4)
        assert bucket["norm"]["task"]["own"] == pytest.approx(float(part.norm()) / weight, rel=1e-4)
    assert [bucket["reward_std"]["max"] for bucket in (low, high)] == pytest.approx([0.5**0.5, 3 * 0.5**0.5])
    cosine = torch.cosine_similarity(*(by_hand[bucket["name"]] for bucket in (low, high)), dim=0)
    assert record_in(tmp_path, "gradient")["task_cosines"][0][1] == pytest.approx(float(cosine), abs=1e-4)
    assert loop.watch.metrics["grad_norm/all/task"] == pytest.approx(loop.norms[0], rel=1e-4)


def test_quartiles_and_single_tokens_are_parts_of_it_and_tried_updates_are_the_loops_own(tmp_path):
    loop, model, ids, mask = one_step(tmp_path)
    record, everything = record_in(tmp_path, "quartile"), mask.bool()
    log_probs = gradloc.token_log_probs(model(ids[:, :-1], ids.shape[1] - 1), ids[:, 1:])
    quartiles = torch.from_numpy(assign(log_probs.detach().numpy(), everything.numpy(), "quantile"))
    whole = gradient_of(loop, model, ids, mask, everything)
    for number, quartile in enumerate(record["quartiles"]):
        part = gradient_of(loop, model, ids, mask, quartiles == number)
        assert quartile["norm"] == pytest.approx(float(part.norm()), rel=1e-4)
        assert quartile["gradient_share"] == pytest.approx(float(part @ whole / whole.norm() ** 2), abs=1e-4)
    assert record["closure"] < 1e-5 and len(record["tokens"]) == 6
    for token in record["tokens"]:
        alone = torch.zeros_like(everything)
        alone[token["row"], token["position"]] = True
        part = gradient_of(loop, model, ids, mask, alone)
        assert token["loss_norm"] == pytest.approx(float(part.norm()), rel=1e-3)
        model.zero_grad()
        fresh = gradloc.token_log_probs(model(ids[:, :-1], ids.shape[1] - 1), ids[:, 1:])
        fresh[token["row"], token["position"]].backward()
        norm = float(torch.cat([param.grad.flatten() for param in model.parameters()]).norm())
        assert token["log_prob_norm"] == pytest.approx(norm, rel=1e-3)
    pairs = zip(loop.model.parameters(), model.parameters(), strict=True)
    moved = [float((new - old).detach().norm() ** 2) for new, old in pairs]
    assert record["updates"]["all"]["update_norm"] == pytest.approx(sum(moved) ** 0.5, rel=1e-3)
    after = gradloc.token_log_probs(loop.model(ids[:, :-1], ids.shape[1] - 1), ids[:, 1:]).exp()
    change = (after - log_probs.exp())[quartiles == 3].detach().abs().mean()
    assert record["updates"]["all"]["changes"]["quartiles"][3]["mean_abs"] == pytest.approx(float(change), rel=1e-2)


def in_layout(folder, layout):
    """Runs on every rank: a step of a loop in this layout; whether it left what the same without analyses leaves."""
    (ids, mask), weights = next(iter(batches(1))), []
    for given in ((folder, "observe", layout), ("", "observe", layout)):
        loop = Policy(*given, **(EACH_STEP if given[0] else {}))
        loop.step(*(values.chunk(loop.size)[loop.rank] for values in (ids, mask, torch.ones(mask.shape))))
        weights.append(flat(loop.model))
    return bool(torch.equal(*weights))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp-once", "fsdp2"])
def test_ranks_measure_together_what_one_process_does(bare_world, tmp_path, layout):
    one_step(tmp_path / "one")
    same = bare_world.run("tests.watch.test_analyses.in_layout", folder=str(tmp_path / "two"), layout=layout)
    assert same == [True, True], "bit for bit"
    alone, together = (record_in(tmp_path / name, "gradient")["buckets"] for name in ("one", "two"))
    for expected, found in zip(alone, together, strict=True):
        assert found["norm"]["task"]["part"] == pytest.approx(expected["norm"]["task"]["part"], rel=1e-4)
        assert found["weight"] == pytest.approx(expected["weight"])
    alone, together = (record_in(tmp_path / name, "quartile") for name in ("one", "two"))
    for expected, found in zip(alone["quartiles"], together["quartiles"], strict=True):
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    for expected, found in zip(alone["tokens"], together["tokens"], strict=True):
        assert found["log_prob_norm"] == pytest.approx(expected["log_prob_norm"], rel=1e-3)
    expected, found = (each["updates"]["lowest"]["changes"]["quartiles"][0]["mean"] for each in (alone, together))
    assert found == pytest.approx(expected, rel=1e-2)


def test_training_with_both_analyses_is_bit_identical_to_training_alone(tmp_path):
    with_both = Policy(tmp_path, **EACH_STEP).run(steps=2)
    assert (
        with_both.watch.metrics["quartile_analysis/failures"] == with_both.watch.metrics["grad_analysis/failures"] == 0
    )
    without = Policy().run(steps=2)
    for mine, plain in zip(with_both.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(mine, plain)
    states = [loop.optimizer.state_dict()["state"] for loop in (with_both, without)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*(s.values() for s in states), strict=True) for name in a)


@pytest.mark.parametrize("without, failures", [(("rewards",), 0), (("rows",), 1)], ids=["rewards", "rows"])
def test_buckets_are_of_advantages_without_rewards_and_refused_without_groups(tmp_path, caplog, without, failures):
    loop, *_ = one_step(tmp_path, without=without)
    assert loop.watch.metrics["grad_analysis/failures"] == failures
    assert loop.watch.metrics["quartile_analysis/failures"] == 0
    assert ("note(rows=...)" in caplog.text) == bool(failures)


@pytest.mark.parametrize(
    "blocks, sentence",
    [
        ({"buckets": {"every": 0}}, "buckets.every must be an integer of at least 1, found 0."),
        ({"quartiles": {"num_token": 3}}, "a setting of quartiles must be one of every, split, num_tokens"),
        ({"buckets": {"env_groups": 3}}, "a setting of buckets must be one of"),
        ({"buckets": 3}, "buckets must be true, false, or settings by name, found 3."),
    ],
)
def test_a_wrong_setting_is_refused_by_its_short_name(blocks, sentence):
    with pytest.raises(ValueError) as refusal:
        taken_from(blocks)
    assert str(refusal.value).startswith(sentence)
    right = {"buckets": True, "quartiles": {"every": 3}, "trigger": {}}
    assert taken_from(right) == (BucketSettings(mode=True), QuartileSettings(mode=True, every=3))
    assert right == {"trigger": {}}


# ---- Lopti


class InStages(Policy):
    """Two optimizer steps of each batch, one in each stage."""

    def stages(self, ids, mask):
        with torch.no_grad():
            self.old = self.forward(ids)
        self.found = []
        for name in ("low", "high"):
            self.optimizer.zero_grad()
            for rows in torch.arange(len(ids)).split(2):
                with self.watch.stage(name, self.old[rows], eta=float(self.old.exp().median())):
                    self.loss(self.forward(ids[rows]), rows, mask[rows]).backward()
            self.found.append(torch.cat([param.grad.flatten() for param in self.model.parameters()]))
            self.take_step()


def test_a_stage_lets_its_own_tokens_gradient_through_and_both_add_up(tmp_path):
    loop, (ids, mask) = InStages(tmp_path, lr=0.0), next(iter(batches(1)))
    for group in loop.optimizer.param_groups:
        group["weight_decay"] = 0.0
    loop.stages(ids, mask)
    model = copy.deepcopy(Policy().model)
    is_low = loop.old < loop.old.exp().median().log()
    for found, chosen in zip(loop.found, (is_low, ~is_low), strict=True):
        torch.testing.assert_close(found, gradient_of(loop, model, ids, mask, chosen), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sum(loop.found), gradient_of(loop, model, ids, mask, mask.bool()), rtol=1e-4, atol=1e-7)


def test_a_spike_in_a_stage_is_searched_in_what_the_stage_let_through(tmp_path):
    loop, (ids, mask) = InStages(tmp_path), next(iter(batches(1)))
    with torch.no_grad():
        old = loop.forward(ids)
    row, position = np.unravel_index(int(old.masked_fill(mask == 0, 1.0).argmin()), old.shape)
    loop.advantages = loop.advantages.clone()
    loop.advantages[row] = 4e3
    loop.stages(ids, mask)
    events = events_in(tmp_path)
    assert {event["step"]["stage"] for event in events} <= {"low", "high"} and events
    assert all(event["certificate"]["verdict"] == "explained" for event in events)


def test_a_stage_that_could_not_be_kept_to_is_an_error_and_no_silent_step(tmp_path):
    loop, (ids, mask) = Policy(tmp_path), next(iter(batches(1)))
    with (
        pytest.raises(RuntimeError, match="the low stage was not kept to"),
        loop.watch.stage("low", torch.zeros(8, 12)),
    ):
        pass
    with pytest.raises(RuntimeError, match="not kept to"), loop.watch.stage("low", torch.zeros(8, 3)):
        loop.loss(loop.forward(ids), torch.arange(8), mask).backward()
    for wrong in ({"name": "middle"}, {"eta": 1.0}):
        with pytest.raises(ValueError, match="Watch.stage's"):
            with loop.watch.stage(**{"name": "low", "old_log_probs": torch.zeros(8, 12), **wrong}):
                pass
