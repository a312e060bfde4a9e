# SPDX-License-Identifier: Apache-2.0
"""A bundle with pictures: replayed with them, refused without."""

import json

import pytest

from tests.replay.conftest import ON, A, edit_meta
from tests.world.models.vision import SIZE

pytestmark = pytest.mark.slow


def test_an_event_with_pictures_is_replayed_with_them(world, single, replay, tmp_path):
    full = [*ON, *SIZE, f"{A}gradloc.evidence.bundle=full"]
    world.run("tests.world.models.vision.train", overrides=full, dump_dir=str(tmp_path / "events"), advantage=1e4)
    single.run("tests.world.models.vision.save_model", folder=str(tmp_path / "model"))
    (bundle,) = (tmp_path / "events" / "events").iterdir()
    done = replay(bundle, tmp_path / "model")
    assert (done["code"], done["err"]) == (0, ""), done["out"]
    record, meta = done["record"], json.loads((bundle / "meta.json").read_text())
    assert record["verdict"] == "same" and record["weights"]["verdict"] == "same"
    assert record["norm"]["replay"] == pytest.approx(meta["event"]["trigger"]["grad_norm"], rel=1e-5)

    edit_meta(bundle, lambda meta: meta.update(multi_modal_note="the pictures take more than 1 MiB"))
    refused = replay(bundle, tmp_path / "model")
    assert refused["code"] == 2 and "cannot be replayed: the pictures take more than 1 MiB." in refused["err"]
