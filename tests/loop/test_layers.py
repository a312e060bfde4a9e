# SPDX-License-Identifier: Apache-2.0
"""Which layer and which kind a parameter belongs to."""

from gradloc.loop.layers import kind_of, layer_of


def test_parameters_are_grouped_by_layer_and_kind():
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "layer 3"
    assert layer_of("_fsdp_wrapped_module.model.layers.11._fsdp_wrapped_module._flat_param") == "layer 11"
    assert layer_of("lm_head.weight") == "head"
    assert kind_of("model.layers.3.post_attention_layernorm.weight") == "norm"
    assert kind_of("model.layers.3.self_attn.q_proj.weight") == "attention"
    assert kind_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight") == "mlp"
