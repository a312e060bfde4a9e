# SPDX-License-Identifier: Apache-2.0
"""A patched verl without our package: with all off it is verl, with something on it ends in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full

IMPORT = """
import sys
import verl.workers.actor.dp_actor, verl.trainer.main_ppo, verl.workers.fsdp_workers
assert [name for name in sys.modules if "gradloc" in name] in ([], ["verl.utils.gradloc_seam"])
"""
DISTRIBUTED = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
"""
TRAIN = f"""
{DISTRIBUTED}
from tests.world.harness import make_batch, make_trainer
trainer = make_trainer(["actor_rollout_ref.actor.use_kl_loss=true"], "x")
for seed in range(3):
    metrics = trainer.update(make_batch(seed=seed))["metrics"]
assert not [name for name in sys.modules if name.partition(".")[0] == "gradloc"]
print(trainer.weights_hash(), sorted(metrics))
"""


def without_ours(site: Path, folder: Path, *others: str) -> Path:
    """An environment's packages, and our tests (verl's archive has some, too), without our package and ``others``."""
    folder.mkdir()
    for entry in site.iterdir():
        if "gradloc" not in entry.name and entry.name not in ("hydra_plugins", "tests", *others):
            (folder / entry.name).symlink_to(entry)
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    site = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    return without_ours(site, tmp_path_factory.mktemp("packages") / "all")


@pytest.fixture
def run(packages, tmp_path):
    def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (packages, tree))), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_it_imports_and_trains_bit_for_bit_as_unpatched_verl(run, base_tree, patched_tree):
    assert run(patched_tree, "-c", IMPORT).returncode == 0
    answers = [run(tree, "-c", TRAIN) for tree in (base_tree, patched_tree)]
    assert all(answer.returncode == 0 for answer in answers), answers[1].stderr[-3000:]
    before, after = (answer.stdout.strip().splitlines()[-1] for answer in answers)
    assert before == after and len(before.split()[0]) == 64


ACTOR = "actor_rollout_ref.actor"
IN_A_FILE = "--config-dir . --config-name mine"
ON = {f"{ACTOR}.spike_detection=True": f"{ACTOR}.spike_detection", "+gradloc=observe": "+gradloc"}
ON |= {"trainer.health.enable=true": "trainer.health.enable", IN_A_FILE: f"{ACTOR}.spike_detection"}


@pytest.mark.parametrize("arguments", [pytest.param(on, marks=[pytest.mark.slow] * (on != IN_A_FILE)) for on in ON])
def test_what_is_switched_on_ends_in_one_sentence_that_says_what_to_install(run, patched_tree, tmp_path, arguments):
    mine = f"defaults: [ppo_trainer, _self_]\n{ACTOR.replace('.', ': {')}: {{spike_detection: true}}}}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    done = run(patched_tree, "-m", "verl.trainer.main_ppo", *arguments.split())
    assert sentence_of(done).startswith(f"{ON[arguments]} needs the package gradloc")
    assert "has none" in done.stderr


def test_another_version_of_the_package_ends_in_the_same_sentence(run, patched_tree, tmp_path):
    (tmp_path / "gradloc.py").write_text('__version__ = "0.3.0"\n')
    done = run(patched_tree, "-m", "verl.trainer.main_ppo", f"{ACTOR}.spike_detection=True")
    assert "has 0.3.0" in sentence_of(done)


def sentence_of(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "gradloc" in line.lower()]
    assert "`pip install .` on every node" in line
    return line
