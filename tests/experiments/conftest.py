# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the experiments' tests, and functions that write a suite to disk."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lab.experiments import catalog

REPO = Path(__file__).resolve().parents[2]


def write_suite(folder: Path, **exit_codes: int) -> None:
    """A suite's `suite.json`, by what each run ended with: ARM, or ARM_seedN."""
    cells = []
    for name, code in exit_codes.items():
        arm, _, seed = name.replace("_", "-").partition("-seed")
        cell = {"arm": arm, "seed": int(seed) if seed else None, "folder": name.replace("_", "-"), "exit_code": code}
        cells.append({**cell, "seconds": 90.0})
    (folder / "suite.json").write_text(json.dumps({"experiment": "any", "cells": cells}))


def write_lines(path: Path, entries: Iterable[Any]) -> None:
    """A file with a line of JSON for each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def write_steps(folder: Path, steps: Iterable[dict[str, Any]]) -> None:
    """A run's metrics, from step 1 on."""
    write_lines(folder / "metrics.jsonl", ({"step": step, "data": data} for step, data in enumerate(steps, 1)))


def composer(world, folder: Path, variables: dict[str, str], **given: Any) -> Callable[..., dict[str, Any]]:
    """``compose(name, overrides, variables)``: an experiment's config, made once, in a rank that has imported verl.

    ``variables``: the environment of all; ``given``: more of :func:`tests.world.configs.experiments`.
    """
    made: dict[str, dict[str, Any]] = {}
    known = catalog.EXPERIMENTS | {form.name: form for form in catalog.ON_VERL09.values()}

    def compose(name: str, overrides: Iterable[str] = (), more: dict[str, str] | None = None) -> dict[str, Any]:
        case = (*known[name].arguments(overrides), more or {})
        if str(case) not in made:
            arguments = {"configs": str(catalog.CONFIGS), "cases": [case], "variables": variables, **given}
            ((made[str(case)],), *_) = world.run("configs.experiments", **arguments)
        found = made[str(case)]
        assert "error" not in found, found["error"]
        assert found["config"]["trainer"]["experiment_name"] == name
        return found["config"]

    compose.folder = folder
    return compose


@pytest.fixture(scope="session")
def verl(patched_tree: Path):
    """Makes `import verl` in this process find the patched tree, unless one is loaded already."""
    pytest.importorskip("torch")
    if "verl" not in sys.modules and str(patched_tree) not in sys.path:
        sys.path.insert(0, str(patched_tree))
    import verl

    return verl


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Model, tokenizer and data with a warm-up of three steps: the form is right, the text not."""
    pytest.importorskip("transformers")
    from lab.experiments.cpu import build, material

    recipe = material.Recipe(warmup_steps=3, warmup_batch=8, num_train=12, num_val=4)
    return material.build(build.LANGUAGE, recipe, tmp_path_factory.mktemp("material"), report=lambda _: None)


@pytest.fixture
def run_experiment(tmp_path):
    """Calls a run_experiment.sh as a user would; returns the finished process."""

    def call(*args, cwd=None, script=REPO / "run_experiment.sh", **variables):
        kept = ("HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
        environ = {key: os.environ[key] for key in kept if key in os.environ}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # a shim may be slow
        return subprocess.run(
            [str(script), *map(str, args)],
            cwd=cwd or tmp_path,
            env={**environ, **{key: str(value) for key, value in variables.items()}},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call
