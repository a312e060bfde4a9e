# SPDX-License-Identifier: Apache-2.0
"""Real events of the real actor on two ranks, and the weights they happened at."""

import json
import re
import shutil
from pathlib import Path

import pytest

A = "actor_rollout_ref.actor."
ON = [f"{A}spike_detection=True", f"{A}grad_norm_threshold=640", f"{A}ppo_micro_batch_size_per_gpu=2"]


@pytest.fixture(scope="session")
def models(single, tmp_path_factory):
    """``model`` has the events' weights, ``other`` has others, the rest other shapes."""
    folder = tmp_path_factory.mktemp("models")
    single.run("tests.replay.scenarios.save_models", folder=str(folder))
    return folder


@pytest.fixture(scope="session")
def prints(world):
    """Fingerprints as the first rank has them; what is sharded must be the same on the second."""
    first, second = world.run("tests.replay.scenarios.fingerprints")
    assert all(first[name] == second[name] for name in first if "fsdp" in name)
    return first


@pytest.fixture(scope="session")
def event(world, tmp_path_factory):
    """``event(name, overrides, plants)``: the bundle of a real event, each name made once."""
    made: dict[str, Path] = {}

    def make(name: str, overrides=(), plants=((2, 3, 1e4),), rollout_noise=None) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(re.sub(r"\W+", "-", name))
            world.run(
                "tests.replay.scenarios.make_event",
                plants=plants,
                overrides=[*ON, *overrides],
                dump_dir=str(folder),
                rollout_noise=rollout_noise,
            )
            (made[name],) = (folder / "events").iterdir()
        return made[name]

    return make


@pytest.fixture
def bundle(event, tmp_path):
    """A copy, free to be spoilt, of an event with one culprit: the culprit's micro-batches."""
    return shutil.copytree(event("spike"), tmp_path / "bundle")


@pytest.fixture
def replay(single, tmp_path):
    """``replay(bundle, model, *options)`` in one process: its exit code, output and ``record``."""
    out = tmp_path / "out.json"

    def run(bundle, model, *options, patches=None):
        out.unlink(missing_ok=True)
        argv = [str(argument) for argument in (bundle, "--model", model, "-o", out, *options)]
        (done,) = single.run("tests.replay.scenarios.run_replay", argv=argv, patches=patches or {})
        return done | {"record": json.loads(out.read_text()) if out.exists() else None}

    return run


def edit_meta(bundle: Path, change) -> None:
    """Rewrite ``meta.json`` after ``change(meta)``."""
    path = bundle / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def edit_tensors(bundle: Path, change) -> None:
    """Rewrite ``batch.safetensors`` after ``change(tensors)``."""
    from safetensors.torch import load_file, save_file

    path = bundle / "batch.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def check_same(record: dict, bundle: Path, slack: float = 1e-5) -> None:
    """A whole step's event is replayed at its weights: the same culprits, and the same norm within ``slack``."""
    event = json.loads((bundle / "meta.json").read_text())["event"]
    assert record["verdict"] == "same"
    assert record["weights"]["verdict"] == "same", record["weights"]["sentence"]
    assert record["micro_batches"]["is_whole_step"]
    assert record["norm"]["replay"] == pytest.approx(event["trigger"]["grad_norm"], rel=slack)
    assert record["certificate"]["verdict"] == "explained"
