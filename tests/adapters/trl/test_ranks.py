# SPDX-License-Identifier: Apache-2.0
"""Two ranks: DDP, and FSDP2 sharded when the model is loaded."""

import pytest

from tests.adapters.trl.conftest import check_harmless, named_in
from tests.world.events import events_in

PLANT = {"what": "token", "factor": 1e3, "rank": 1}
LAYOUTS = {
    "DDP": {},
    "DDP, two generations a step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "DDP, what is taken over all ranks": {
        "top_entropy_quantile": 0.8,
        "use_adaptive_entropy": True,
        "entropy_target": 3.0,
        "entropy_coef": 0.01,
        "beta": 0.05,
    },
    "DDP, LoRA": {"lora": True},
    "DDP, bf16 autocast, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "FSDP2": {"sharded": True},
    "FSDP2, bf16 autocast": {"sharded": True, "bf16": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_observing_changes_nothing_and_masking_is_training_without_the_token(run_on_two, tmp_path, layout):
    observed = check_harmless(run_on_two, {}, {}, plant=PLANT, **layout)
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == sorted(tuple(place) for of_rank in observed for place in of_rank["where"])
    assert {culprit["rank"] for culprit in event["culprits"]} == {1}
    assert event["certificate"]["verdict"] == "explained" and event["step"]["dp_size"] == 2
