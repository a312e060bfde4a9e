# SPDX-License-Identifier: Apache-2.0
"""Ways to compute the same: log-probs without logits, a compiled entropy, and Liger's kernels.

The last on triton's interpreter, which needs no GPU: docs/compatibility.md has the command.
"""

import os

import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, MODES, PLANTS, TAU, check_planted, check_training
from tests.trainers import NONE, VERL09, default_on, not_on

MODEL = "actor_rollout_ref.model"
BF16 = [f"{ACTOR}.fsdp_config.dtype=bfloat16"]
FUSED = [f"{MODEL}.use_fused_kernels=true", f"{ACTOR}.entropy_coeff=0.05"]
COMPILED = [f"{ACTOR}.use_torch_compile=true", f"{MODEL}.use_remove_padding=true", f"{ACTOR}.entropy_coeff=0.05"]
LIGER = [f"{MODEL}.use_liger=true", f"{ACTOR}.ppo_epochs=1"]  # the interpreter takes its time
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
LAYOUTS = {
    "fused, FSDP1, bf16": FUSED + FSDP1 + BF16,
    "fused, FSDP1": FUSED + FSDP1,
    "fused, FSDP2, bf16": FUSED + BF16,
    "fused, FSDP2": FUSED,
    "compiled": COMPILED,
    "Liger": LIGER,
}
NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton's interpreter: docs/compatibility.md"
)


def marks(name):
    return [pytest.mark.slow, NEEDS_INTERPRETER] if name == "Liger" else [pytest.mark.slow]


class UnderKernels:
    """A world in which a scenario runs under kernels that take their time, Liger's as the interpreter has them."""

    def __init__(self, world, name):
        self.world, self.is_liger = world, name == "Liger"

    def run(self, scenario, **given):
        if self.is_liger:
            scenario, given = "tests.world.models.fused.with_liger", {"scenario": scenario, **given}
        return self.world.run(scenario, timeout_s=900, **given)


@default_on(verl07=("fused, FSDP1, bf16",), verl09=NONE)
@not_on(
    VERL09,
    "verl 0.9.1 itself fails: FSDP2 shards an untied head apart, and the kernel takes its weight",
    "fused, FSDP2",
)
@pytest.mark.parametrize(
    "name", ["fused, FSDP1, bf16", *(pytest.param(name, marks=marks(name)) for name in list(LAYOUTS)[1:])]
)
def test_the_planted_culprits_are_the_oracles(world, dump_dir, name):
    half = {"share": 0.03, "norm": 0.03, "before": None, "after": 0.05, "closure": 0.2}
    within = half if "bf16" in name else {"share": 2e-3, "closure": 0.01}
    event, _ = check_planted(UnderKernels(world, name), dump_dir, PLANTS, [TAU, *LAYOUTS[name]], **within)
    assert event["shares"]["is_trusted"]


@default_on(verl07=NONE, verl09=NONE)
@MODES
@pytest.mark.parametrize("name", ["fused, FSDP1, bf16", pytest.param("Liger", marks=marks("Liger"))])
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, name, mode):
    layout = [setting for setting in LAYOUTS[name] if "entropy" not in setting]
    spikes = 1 if name == "Liger" else 2
    check_training(UnderKernels(world, name), dump_dir, mode, spikes=spikes, layout=layout)
