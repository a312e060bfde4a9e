# SPDX-License-Identifier: Apache-2.0
"""An action applies to every spike of every epoch; budgets limit what is written."""

import pytest

from tests.trainers import default_on
from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
TAU = f"{ACTOR}.grad_norm_threshold=640"


@default_on(verl07=("fsdp1",), verl09=("fsdp2",))
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=fsdp2"],
        ["strategy=fsdp"],
        pytest.param(["strategy=fsdp2", "fsdp_config.dtype=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["strategy=fsdp", "fsdp_config.dtype=bfloat16"], marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "fsdp1", "fsdp2-bf16", "fsdp1-bf16"],
)
def test_every_appearance_of_a_culprit_is_masked_and_the_weights_are_those_without_it(world, dump_dir, layout):
    settings, layout = [TAU, f"{ACTOR}.gradloc.action.mode=mask"], [f"{ACTOR}.{setting}" for setting in layout]
    found, other = world.run(
        "actions.train_epochs", lets_out=True, overrides=settings, dump_dir=dump_dir, layout=layout
    )
    assert found["is_same"] and other["is_same"], "bit for bit"
    metrics = found["metrics"]
    assert (metrics["gradloc/spikes"], metrics["gradloc/mask"], metrics["gradloc/unwritten"]) == ([2], [2], [1])
    (event,) = read_events(dump_dir)
    done, after = event["consequence"], event["certificate"]["norm_after"]
    assert metrics["gradloc/events"] == [1] and done["culprit_share"] == 0.0
    assert done["clip_scale"] == pytest.approx(min(1.0, 1.0 / after), rel=1e-4)
    assert done["healthy_norm"] == pytest.approx(min(after, 1.0), rel=1e-4)
    # float32 resolves a spike of 2,244 to 1e-4 of the 1.99 without its token.
    assert found["norm_taken"] == pytest.approx(after, rel=1e-4), "what the step reports"
    assert "The optimizer took the step without it" in event["verdict"]
    for name in ("clip_scale", "culprit_share", "healthy_norm"):
        assert metrics[f"gradloc/{name}"] == [done[name]]
