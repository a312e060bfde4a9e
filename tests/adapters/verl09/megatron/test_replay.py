# SPDX-License-Identifier: Apache-2.0
"""An event of a run on Megatron, replayed on transformers' model of the same weights."""

import json

from gradloc.replay.__main__ import main
from tests.replay.conftest import check_same

from .conftest import HERE
from .layouts import LAYOUTS, in_layouts
from .test_layouts import ACTOR, ON, PLANT

STILL = [f"{ACTOR}.optim.lr=0", f"{ACTOR}.gradloc.evidence.bundle=full"]  # the weights stay those of the folder
NAMES = ("TP 2", "PP 2", "DP 2, sharded optimizer", "CP 2", "DP 2, by tokens")


@in_layouts(*NAMES, default=("TP 2",))
def test_the_same_event_at_its_weights_gives_the_same_culprits_and_the_same_norm(world, layout, tmp_path):
    folder, dump_dir = str(tmp_path / "model"), tmp_path / "events"
    world.run(f"{HERE}.harness.save_model", folder=folder)
    settings = [*ON, *STILL, *LAYOUTS[layout].overrides, f"{ACTOR}.gradloc.dump_dir={dump_dir}"]
    world.run(f"{HERE}.harness.train", overrides=settings, model_dir=folder, plants=(PLANT,))
    *_, bundle = sorted((dump_dir / "events").iterdir())
    out = tmp_path / "out.json"
    assert main([str(bundle), "--model", folder, "-o", str(out)]) == 0
    check_same(json.loads(out.read_text()), bundle)
