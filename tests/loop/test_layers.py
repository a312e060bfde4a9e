# SPDX-License-Identifier: Apache-2.0
"""Norms by layer: the head's part, what stands above a layer's own history, and how layers moved together."""

import math

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.loop.layers import head_square, kind_of, layer_history, layer_of, names_for_layers, norms_by

NAMES = [
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
]


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.embed_tokens.weight", "embedding", "embedding"),
        ("lm_head.weight", "head", "head"),
        ("model.norm.weight", "norm", "norm"),
        ("model.layers.3.self_attn.q_proj.weight", "layer 3", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "layer 3", "norm"),
        ("model.layers.12.mlp.gate_proj.weight", "layer 12", "mlp"),
        ("model.layers.3.post_attention_layernorm.weight", "layer 3", "norm"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", "layer 0", "mlp"),
    ],
)
def test_a_parameter_s_layer_and_kind_are_in_its_name(name, layer, kind):
    assert (layer_of(name), kind_of(name)) == (layer, kind)


def test_a_flat_parameter_of_fsdp1_is_of_its_layer():
    assert layer_of("_fsdp_wrapped_module.model.layers.11._fsdp_wrapped_module._flat_param") == "layer 11"


def test_norms_of_a_group_are_the_root_of_their_squares():
    found = norms_by(layer_of, NAMES, torch.tensor([9.0, 16.0, 4.0], dtype=torch.float64))
    assert found == {"layer 0": 5.0, "layer 1": 2.0}


@pytest.mark.parametrize(("tied", "square"), [(False, 4 * 9.0), (True, 6 * 4.0)])
def test_the_head_s_part_is_the_embedding_s_where_they_are_tied(tied, square):
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Linear(2, 3, bias=False)})
    if not tied:
        model["lm_head"] = torch.nn.Linear(2, 2, bias=False)
        model["lm_head"].weight.grad = torch.full((2, 2), 3.0)
    model["embed_tokens"].weight.grad = torch.full((3, 2), 2.0)
    assert float(head_square(GradientSpace(model))) == pytest.approx(square)
    model["embed_tokens"].weight.grad = None
    assert float(head_square(GradientSpace(model))) == (0.0 if tied else pytest.approx(square))


def test_a_head_that_no_name_shows_is_the_trainer_s_or_not_known():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model(torch.ones(1, 3)).sum().backward()
    space = GradientSpace(model)
    assert float(head_square(space)) < 0, "not known"
    frozen = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(4, 2).requires_grad_(False), "body": model})
    assert float(head_square(GradientSpace(frozen))) == 0.0, "it has no gradient"
    space.heads = frozenset({"1.weight", "1.bias"})
    wanted = sum(float(param.grad.square().sum()) for param in model[1].parameters())
    assert float(head_square(space)) == pytest.approx(wanted)
    assert names_for_layers(space) == ["0.weight", "0.bias", "lm_head", "lm_head"]


def history(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_a_layer_is_held_against_its_own_median():
    names = NAMES[1:]
    found = layer_history(names, history([400.0, 4.0])[0], history([1.0, 1.0], [4.0, 4.0], [16.0, 16.0]))
    assert found.num_steps == 3 and found.excess == pytest.approx({"layer 0": 10.0, "layer 1": 1.0})
    assert found.mean_correlation == pytest.approx(1.0)
    assert layer_history(names, history([4.0, 4.0])[0], None) is None


def test_layers_that_went_against_each_other_are_told():
    found = layer_history(NAMES[1:], history([1.0, 1.0])[0], history([1.0, 16.0], [4.0, 4.0], [16.0, 1.0]))
    assert found.mean_correlation == pytest.approx(-1.0)
    still = layer_history(NAMES[1:], history([1.0, 1.0])[0], history([1.0, 1.0], [1.0, 4.0]))
    assert math.isfinite(still.mean_correlation)


def test_the_spread_is_the_largest_layer_s_over_the_median_one_s():
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3)]
    found = layer_history(names, history([1.0, 4.0, 900.0])[0], history([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]))
    assert found.excess == pytest.approx({"layer 0": 1.0, "layer 1": 2.0, "layer 2": 30.0})
    assert found.spread == pytest.approx(15.0)
    one = layer_history(names[:1], history([9.0])[0], history([1.0], [1.0]))
    assert one.mean_correlation == 1.0 and one.spread == pytest.approx(1.0)


def test_a_layer_that_never_had_a_gradient_is_not_called_above_it():
    found = layer_history(NAMES[1:], history([4.0, 9.0])[0], history([0.0, 1.0], [0.0, 1.0]))
    assert found.excess == pytest.approx({"layer 0": 1.0, "layer 1": 3.0})
