# SPDX-License-Identifier: Apache-2.0
"""`two-nodes` reports each file of a run that is not where the docs say."""

import json
import shutil

import pytest

from lab.experiments import summaries
from lab.experiments.cpu import places
from tests.experiments.conftest import write_lines
from tests.experiments.test_verdict import EVENT, PLANTED


@pytest.fixture
def suite_dir(tmp_path):
    """A suite of one run, which went on from a checkpoint; everything is as the docs say."""
    run_dir = tmp_path / "resumed"
    root = run_dir / "node-1" / "events" / "of this run"
    weights = root / "weights" / "global_step_5" / "actor"
    (weights / "huggingface").mkdir(parents=True)
    for name in ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "fsdp_config.json"):
        (weights / name).touch()
    bundle = root / "events" / "one"
    bundle.mkdir(parents=True)
    for name in ("batch.safetensors", "sequences.json"):
        (bundle / name).touch()
    (bundle / "meta.json").write_text(json.dumps({"checkpoint": str(weights)}))
    last = str(tmp_path / "spike" / "global_step_3")
    event = {**EVENT, "folder": "events/one", "consequence": {"last_checkpoint": last}}
    write_lines(root / "events.jsonl", [event])
    (run_dir / "planted.json").write_text(json.dumps(PLANTED))
    overrides = ["seed=1", "trainer.resume_from_path=${demo.run_dir}/../spike/global_step_3"]
    cells = [{"folder": "resumed", "overrides": overrides, "exit_code": 0}]
    (tmp_path / "suite.json").write_text(json.dumps({"experiment": "two-nodes", "cells": cells}))
    return tmp_path


ROOT = "resumed/node-1/events/of this run"


def test_a_run_with_everything_in_its_place_is_said_to_be(suite_dir, capsys):
    assert summaries.main([places.__name__, str(suite_dir)]) == 0
    assert places.FOUND in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["weights/global_step_5/actor/model_world_size_2_rank_1.pt", "events/one/sequences.json"]
)
def test_a_file_that_is_missing_is_named(suite_dir, capsys, name):
    (suite_dir / ROOT / name).unlink()
    assert summaries.main([places.__name__, str(suite_dir)]) == 1
    assert f"{suite_dir / ROOT / name} is not there" in capsys.readouterr().err


def test_events_in_two_working_folders_are_not_one_run_s(suite_dir, capsys):
    shutil.copytree(suite_dir / ROOT, suite_dir / ROOT.replace("node-1", "node-0"))
    assert summaries.main([places.__name__, str(suite_dir)]) == 1
    assert "one node's working folder was to hold" in capsys.readouterr().err


def test_another_checkpoint_than_the_one_resumed_from_is_a_problem(suite_dir, capsys):
    text = (suite_dir / "suite.json").read_text()
    (suite_dir / "suite.json").write_text(text.replace("global_step_3", "global_step_2"))
    assert summaries.main([places.__name__, str(suite_dir)]) == 1
    assert "the last checkpoint is said to be" in capsys.readouterr().err
