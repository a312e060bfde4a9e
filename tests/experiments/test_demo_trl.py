# SPDX-License-Identifier: Apache-2.0
"""`demo trainer=trl`, up to the point where the trainer would start; the rest is in tests/adapters/trl/test_demo.py."""

import json

import pytest

from tests.experiments.cpu.test_verdict import EVENT, PLANTED
from tests.experiments.test_run_experiment import one_sentence

pytestmark = pytest.mark.full


def test_a_dry_run_shows_two_processes_and_what_is_handed_on(run_experiment, tmp_path):
    done = run_experiment(
        "demo", "trainer=trl", "gradloc=mask", "--dry-run", TRL_PYTHON="/a/python", RUN_DIR=tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "/a/python -m torch.distributed.run --standalone --nproc-per-node=2 -m experiments.trl.demo gradloc=mask"
        in done.stdout
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [("demo", "trainer=openrlhf"), ("wild", "trainer=trl"), ("demo", "trainer=trl", "verl=0.9.1")]
)
def test_it_is_the_demo_alone_and_without_a_version_of_verl(run_experiment, arguments):
    assert "is for the demo alone, as trainer=trl and without verl=VERSION" in one_sentence(
        run_experiment(*arguments), 2
    )


def test_a_plant_that_names_no_prompt_is_found_by_its_place(tmp_path, capsys):
    from experiments.cpu import verdict

    planted = {name: value for name, value in PLANTED.items() if name not in ("uid", "rollout_index")}
    (tmp_path / "gradloc").mkdir()
    (tmp_path / "gradloc" / "events.jsonl").write_text(json.dumps(EVENT) + "\n")
    (tmp_path / "planted.json").write_text(json.dumps(planted))
    assert verdict.main([str(tmp_path)]) == 0
    assert "step 5, row 52 of the batch, response position 12" in capsys.readouterr().out
