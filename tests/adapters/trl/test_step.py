# SPDX-License-Identifier: Apache-2.0
"""Under every loss and layout of TRL's: looking leaves the run as it was, masking is training without the token."""

import pytest
import torch
from trl.trainer import utils

from gradloc.core.step import has_finite_loss, kl_coefficients
from tests.adapters.trl.conftest import SAME, check_harmless, named_in
from tests.adapters.trl.harness import LossReplay, OfLogits, make
from tests.world.events import events_in

TOKEN = {"what": "token", "factor": 1e3}
SEQUENCE = {"what": "sequence", "factor": 1e3}
LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "plant": SEQUENCE, "tau": 300.0},
    "sequence ratios": {"loss_type": "grpo", "importance_sampling_level": "sequence", "plant": SEQUENCE},
    "RLOO": {"base": "RLOOTrainer", "plant": SEQUENCE},
    "RLOO, KL and two iterations": {"base": "RLOOTrainer", "plant": SEQUENCE, "beta": 0.05, "num_iterations": 2},
    "a loss of the user's own": {"own_loss": LossReplay},
    "high entropies alone": {"top_entropy_quantile": 0.8},
    "KL": {"beta": 0.05},
    "KL with its correction": {"beta": 0.05, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef": 0.01},
    "off-policy mask, several steps a generation": {"off_policy_mask_threshold": 0.5, "steps_per_generation": 4},
    "two iterations": {"num_iterations": 2, "delta": 4.0},
    "two generations a step": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    "one micro-batch": {"steps_per_generation": 1, "gradient_accumulation_steps": 1},
    "truncated completions": {"mask_truncated_completions": True},
    "a tool's answer": {"plant": {**TOKEN, "tool": (2, 4)}},
    "vLLM's ratios": {"plant": {**TOKEN, "ratio": "token"}},
    "vLLM's ratios of sequences": {"plant": {**TOKEN, "ratio": "sequence"}},
    "checkpointing": {"gradient_checkpointing": True},
    "dropout": {"dropout": 0.1},
    "no clip": {"max_grad_norm": 0.0},
    "LoRA and KL": {"lora": True, "beta": 0.05},
    "bf16 autocast": {"bf16": True},
    "bf16 weights": {"dtype": "bfloat16"},
    "experts and their balancing loss": {"experts": True, "router_aux_loss_coef": 0.02},
    "experts": {"experts": True, "router_aux_loss_coef": 0.0},
}


SLOW = ("bnpo", "dr_grpo", "sequence ratios", "RLOO", "KL", "entropy", "two generations a step", "experts")
SLOW += ("vLLM's ratios of sequences", "checkpointing", "bf16 autocast")
"""Parts of other cases, here or in test_ranks.py; test_a_tokens_weight_is_that_of_the_papers_mean has losses."""
CASES = [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in LOSSES.items()]


@pytest.mark.parametrize("case", CASES)
def test_observing_changes_nothing_and_masking_is_training_without_the_token(run, tmp_path, case):
    case = {"plant": TOKEN, **case}
    trigger = {"tau": case.pop("tau", 20.0)}
    (observed,) = check_harmless(run, {"trigger": trigger}, {"max_masked_share": 0.9}, **case)
    (event, *_) = events = events_in(tmp_path / "watched")
    steps = {event["step"]["global_step"] for event in events}
    assert named_in(events) == sorted(tuple(place) for place in observed["where"] if place[0] in steps)
    assert {event["certificate"]["verdict"] for event in events} == {"explained"}
    assert event["cause"]["label"] == "extreme_advantage"
    low, high = (0.85, 1.15) if case.get("bf16") or "dtype" in case else (0.97, 1.03)
    assert low <= event["shares"]["closure"] <= high


def test_a_loss_that_asks_for_no_log_probs_as_trls_does_is_looked_into(run, tmp_path):
    given = {"plant": TOKEN, "own_loss": OfLogits}
    stock, observed = run("stock", **given), run("watched", **given)
    assert [observed[key] for key in SAME] == [stock[key] for key in SAME]
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == [tuple(place) for place in observed["where"]] and event["cures"] is None
    assert event["certificate"]["verdict"] == "explained" and event["cause"]["label"] == "extreme_advantage"


def stepped(folder, **given):
    """A trainer that has taken a watched step, and the step, which can still be asked."""
    kept = []

    def prepare(trainer):
        end = trainer._watch.localizer.end_update
        trainer._watch.localizer.end_update = lambda: (kept.append(trainer._watch.step), end())

    trainer = make("watched", folder, max_steps=1, prepare=prepare, **given)
    trainer.train()
    trainer._watch.step = kept[0]
    return trainer, kept[0]


WEIGHTS = {
    "grpo": lambda mask, step: mask / mask.sum(1, keepdim=True) / len(mask) / 2,
    "bnpo": lambda mask, step: mask / mask.sum() / 2,
    "dr_grpo": lambda mask, step: mask / (len(mask) * 12) / 2,
    "luspo": lambda mask, step: mask / len(mask) / 2,
    "dapo": lambda mask, step: mask / sum(int(inputs["completion_mask"].sum()) for inputs in step.inputs),
    "RLOO": lambda mask, step: mask / len(mask) / 2,  # a sequence's part of the mean
}


def test_a_forward_takes_the_tiles_of_trls_kernel(tmp_path, monkeypatch):
    _, step = stepped(str(tmp_path))
    before = step.forward_bytes()
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 2 * utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    assert step.forward_bytes() == 2 * before > 0


@pytest.mark.parametrize("loss", WEIGHTS)
def test_a_tokens_weight_is_that_of_the_papers_mean(tmp_path, loss):
    _, step = stepped(str(tmp_path), **({"base": "RLOOTrainer"} if loss == "RLOO" else {"loss_type": loss}))
    for index in range(2):
        expected = WEIGHTS[loss](step.token_mask(index).float(), step)
        torch.testing.assert_close(step.details(index).weights, expected)


def test_the_kl_terms_part_is_its_own_derivative(tmp_path):
    trainer, step = stepped(str(tmp_path), beta=0.05, loss_type="dr_grpo")
    leaf = step.recorded(1).log_prob.float().requires_grad_()
    difference = step.inputs[1]["ref_per_token_logps"] - leaf
    term = 0.05 * (difference.exp() - difference - 1) * step.token_mask(1) / (4 * 12) / 2
    (expected,) = torch.autograd.grad(term.sum(), leaf)
    torch.testing.assert_close(kl_coefficients(step, 1), expected, atol=1e-7, rtol=1e-4)


def test_a_replay_leaves_nothing_behind_in_the_trainer(tmp_path):
    trainer, step = stepped(str(tmp_path), use_adaptive_entropy=True, entropy_target=3.0, entropy_coef=0.01, beta=0.05)
    before = {name: value for name, value in vars(trainer).items() if isinstance(value, float | int | str)}
    counts = {name: len(values) for name, values in trainer._metrics["train"].items()}
    own = set(vars(trainer.accelerator))
    step.details(0), kl_coefficients(step, 1), has_finite_loss(step, 0), step.forward(1)
    assert {name: vars(trainer)[name] for name in before} == before
    assert {name: len(values) for name, values in trainer._metrics["train"].items()} == counts
    assert set(vars(trainer.accelerator)) == own


def test_generation_is_no_part_of_what_a_step_takes(tmp_path):
    order = []

    def prepare(trainer):
        begin, generate = trainer._watch.localizer._peak.begin, trainer._generate_and_score_completions
        trainer._watch.localizer._peak.begin = lambda device: (order.append("peak from here"), begin(device))
        trainer._generate_and_score_completions = lambda inputs: (order.append("generated"), generate(inputs))[1]

    make("watched", str(tmp_path), max_steps=1, prepare=prepare).train()
    assert "generated" in order and order[-1] == "peak from here"
