# SPDX-License-Identifier: Apache-2.0
"""The rules that need no process group: trigger, verdict, action, cause, selections."""

import math
import random
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def gradloc():
    """The modules under test."""
    import importlib

    names = {
        "core": ["trigger", "history", "certificate", "actions", "selection"],
        "words": ["causes"],
        "loop": ["layers"],
        "record": ["store"],
        "search": ["rows"],
    }
    return SimpleNamespace(
        record=importlib.import_module("gradloc.record"),
        **{n: importlib.import_module(f"gradloc.{room}.{n}") for room, ns in names.items() for n in ns},
    )


# ---- the history of norms that the health rules and the clipping by layer keep


def fires(gradloc, norms, **settings):
    history = gradloc.history.History(**{"window": 64, "warmup": 16, "num_deviations": 6.0, **settings})
    fired = []
    for step, norm in enumerate(norms):
        kind = gradloc.trigger.spike_kind(norm, history.threshold(), "adaptive")
        if kind:
            fired.append(step)
        history.observe(norm, kind is not None)
    return fired


def healthy(seed, steps=400, level=lambda step: 0.8):
    rng = random.Random(seed)
    return [level(step) * math.exp(rng.gauss(0, 0.25)) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_history_never_fires(gradloc, seed):
    assert fires(gradloc, healthy(seed)) == []


@pytest.mark.parametrize("seed", range(5))
def test_one_spike_fires_once_and_leaves_the_threshold_alone(gradloc, seed):
    norms = healthy(seed)
    norms[200] = 111.0
    norms[300] = 54_648_652.0
    assert fires(gradloc, norms) == [200, 300]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_drift_over_two_orders_of_magnitude_never_fires(gradloc, seed):
    assert fires(gradloc, healthy(seed, level=lambda step: 0.1 * 100 ** (step / 400))) == []


def test_a_new_level_is_learned_after_a_few_steps(gradloc):
    norms = healthy(0, 100) + [50 * norm for norm in healthy(1, 300)]
    fired = fires(gradloc, norms)
    assert fired == list(range(100, 108))


def test_nothing_but_non_finite_fires_before_the_warm_up_is_over(gradloc):
    norms = [0.5, 900.0, float("nan"), 0.6, float("inf")] + healthy(0, 20)
    assert fires(gradloc, norms) == [2, 4]


def test_a_history_comes_back_from_a_checkpoint_exactly(gradloc):
    norms = healthy(3, 90)
    one = gradloc.history.History(64, 16, 6.0)
    for norm in norms:
        one.observe(norm, False)
    two = gradloc.history.History(64, 16, 6.0)
    two.load_state(one.state())
    assert two.threshold() == one.threshold() and two.summary() == one.summary()


def test_the_published_threshold_is_tau_over_root_n(gradloc):
    assert gradloc.trigger.fixed_threshold(640.0, 16384) == 5.0
    assert gradloc.trigger.fixed_threshold(640.0, 0) == math.inf


# ---- verdict and action


@pytest.mark.parametrize(
    ("norm", "bound", "threshold", "verdict"),
    [
        (1.0, 0.0, 10.0, "explained"),
        (1.0, 4.4, 10.0, "explained"),
        (1.0, 4.6, 10.0, "undecided"),
        (19.0, 4.4, 10.0, "not_explained"),
        (19.0, 4.6, 10.0, "undecided"),
        (10.0, 0.0, 10.0, "undecided"),
        (math.nan, 0.0, 10.0, "not_explained"),
        (1.0, math.nan, 10.0, "undecided"),
        (1.0, 0.0, None, "undecided"),
    ],
)
def test_a_verdict_needs_a_bound_below_half_the_distance_to_the_threshold(gradloc, norm, bound, threshold, verdict):
    assert gradloc.certificate.judge(norm, bound, threshold)[0] == verdict


@pytest.mark.parametrize(("norm_after", "verdict"), [(3.0, "explained"), (math.inf, "not_explained")])
def test_what_was_not_finite_is_explained_by_being_finite_where_there_is_no_threshold_yet(gradloc, norm_after, verdict):
    assert gradloc.certificate.judge(norm_after, 0.1, None, was_finite=False)[0] == verdict


def decide(gradloc, mode, verdict="explained", num_masked=1, kind="fixed", obstacle=None, norm_after=1.0):
    limits = SimpleNamespace(mode=mode, max_masked_tokens=8, max_masked_share=0.05)
    spike = gradloc.trigger.Spike(kind, 9.0, 5.0, 1.0, 1000)
    certificate = gradloc.certificate.Certificate(9.0, norm_after, 0.0, 5.0, "swap", verdict, "because")
    tokens = [gradloc.selection.Token(0, 0, index) for index in range(num_masked)]
    return gradloc.actions.decide(limits, spike, certificate, tokens, obstacle).taken


def test_actions_are_taken_as_configured_or_fall_back_to_skip(gradloc):
    assert decide(gradloc, "observe") == "observe"
    assert decide(gradloc, "skip") == "skip"
    assert decide(gradloc, "abort") == "abort"
    assert decide(gradloc, "mask") == "mask"
    assert decide(gradloc, "mask", verdict="not_explained", norm_after=6.0) == "skip"
    assert decide(gradloc, "mask", verdict="undecided", norm_after=5.1) == "skip"
    assert decide(gradloc, "mask", verdict="undecided", norm_after=4.9) == "mask"
    assert decide(gradloc, "mask", num_masked=9) == "skip"
    assert decide(gradloc, "mask", obstacle="overflow") == "skip"
    assert decide(gradloc, "abort", kind="forced") == "observe"


# ---- causes


def classify(gradloc, **changes):
    record = gradloc.record
    spread = changes.pop("layer_spread", None)
    culprit = record.Culprit(
        coefficients=record.Coefficients(**changes.pop("coefficients", {"log_prob": -0.01})),
        ratios=record.Ratios(sequence_geometric_mean=changes.pop("mean_ratio", 1.0)),
        **{
            "loss_weight": 0.01,
            "grad_norm": 0.05,
            "advantage": 1.0,
            "log_prob": -0.5,
            "old_log_prob_used": -0.5,
            **changes,
        },
    )
    return gradloc.causes.classify(culprit, record.BatchStatistics(1.0, 0.4, 5.0, spread)).label


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "unknown"),
        ({"advantage": 800.0}, "extreme_advantage"),
        ({"old_log_prob_used": -9.0}, "token_mismatch"),
        ({"old_log_prob_used": -9.0, "mean_ratio": 3000.0}, "sequence_mismatch"),
        ({"is_weight": 40.0}, "is_weight"),
        ({"grad_norm": 9.0}, "large_jacobian"),
        ({"grad_norm": 9.0, "layer_spread": 30.0}, "layer_heterogeneity"),
        ({"grad_norm": 0.2, "log_prob": -9.0, "old_log_prob_used": -9.0}, "low_probability"),
        (
            {"coefficients": {"log_prob": 4.0, "kl": 4.01}},
            "kl_term",
        ),
        (
            {"coefficients": {"log_prob": 0.0, "entropy": -1.0}},
            "entropy_term",
        ),
        (
            {"coefficients": {"log_prob": math.nan}},
            "non_finite",
        ),
        ({"advantage": math.inf}, "non_finite"),
    ],
)
def test_the_factor_furthest_above_typical_is_the_cause(gradloc, changes, label):
    assert classify(gradloc, **changes) == label


# ---- small things


def spans(gradloc, values, weights=None, stands_out=True):
    import torch

    weights = torch.ones(len(values)) if weights is None else torch.tensor(weights)
    values = torch.tensor(values)
    return gradloc.rows.Row(values, torch.zeros_like(values), weights, 1.0, 1.0).spans(stands_out)


def test_a_row_is_named_by_its_few_tokens_its_segment_or_as_a_sequence(gradloc):
    quiet = [0.01] * 40
    assert spans(gradloc, quiet) == []
    assert spans(gradloc, [*quiet, 5.0, *quiet]) == [(40, 41)]
    assert spans(gradloc, [5.0, *quiet, 5.0, *quiet, -9.0]) == [(0, 1), (41, 42), (82, 83)]
    assert spans(gradloc, [*quiet, *[3.0] * 16, *quiet]) == [(40, 56)], "a cluster is one segment"
    assert spans(gradloc, [*[3.0] * 4, 0.01, *[3.0] * 4, *quiet]) == [(0, 4), (5, 9)], "without its quiet inner token"
    assert spans(gradloc, [1.5] * 60) == [(0, 60)], "a spread row is no list of its loudest tokens"
    assert spans(gradloc, [0.1] * 60) == [(0, 60)], "nor is it overlooked when none of them is loud"
    assert spans(gradloc, [0.1] * 60, stands_out=False) == [], "unless all rows are like it"
    assert spans(gradloc, [4.0, -4.0, *quiet]) == [(0, 1), (1, 2)], "a pair that cancels"
    assert spans(gradloc, [4.0, *[0.01] * 8, 3.9, *quiet]) == [(0, 1), (9, 10)], "two tokens, not what is between"


def test_a_row_that_the_loss_weighs_more_as_a_whole_is_a_sequence(gradloc):
    values = [2.0, 0.6, 1.5, 0.2, 0.3, 1.1, 0.4, 0.6, 0.3, 0.1]
    assert spans(gradloc, values, [50.0] * 10) == [(0, 10)]
    assert spans(gradloc, values, [50.0] * 8 + [0.0] * 2) == [(0, 10)], "clipped tokens aside"
    loud = [9.0, *[0.01] * 9]
    assert spans(gradloc, loud, [4.0] * 10) == [(0, 1)], "one token carries it, though the row weighs more"
    several = [9.0, 9.0, 9.0, 9.0, *[0.01] * 6]
    assert spans(gradloc, several, [500.0] * 4 + [4.0] * 6) == [(0, 4)], "some of it weighs still more"


def test_a_cut_off_line_does_not_spoil_the_next_event(gradloc, tmp_path):
    store = gradloc.store.EventStore(str(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"a": 1}\n{"cut": ')
    store.append({"b": math.nan, "c": [math.inf, -math.inf]})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[0] == '{"a": 1}' and lines[-1] == '{"b": "NaN", "c": ["Infinity", "-Infinity"]}'


def test_event_names_are_unique_when_a_resumed_run_passes_a_step_again(gradloc, tmp_path):
    store = gradloc.store.EventStore(str(tmp_path))
    first = store.new_id(7, 0, 1)
    store.write_folder(first, {}, {"sequences": {}})
    assert store.new_id(7, 0, 1) == f"{first}-2"


def test_who_may_read_an_event_may_replay_it(gradloc, tmp_path):
    import torch

    folder = tmp_path / gradloc.store.EventStore(str(tmp_path)).write_folder("a", {"x": torch.ones(2)}, {"meta": {}})
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["batch.safetensors"] == modes["meta.json"]


def test_parameters_are_grouped_by_layer_and_kind(gradloc):
    layer_of, kind_of = gradloc.layers.layer_of, gradloc.layers.kind_of
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "layer 3"
    assert layer_of("_fsdp_wrapped_module.model.layers.11._fsdp_wrapped_module._flat_param") == "layer 11"
    assert layer_of("lm_head.weight") == "head"
    assert kind_of("model.layers.3.post_attention_layernorm.weight") == "norm"
    assert kind_of("model.layers.3.self_attn.q_proj.weight") == "attention"
    assert kind_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight") == "mlp"
