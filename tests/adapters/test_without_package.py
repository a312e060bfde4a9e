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
TRAIN = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
from tests.world.harness import make_batch, make_trainer
trainer = make_trainer(["actor_rollout_ref.actor.use_kl_loss=true"], "x")
for seed in range(3):
    metrics = trainer.update(make_batch(seed=seed))["metrics"]
assert not [name for name in sys.modules if name.partition(".")[0] == "gradloc"]
print(trainer.weights_hash(), sorted(metrics))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """This environment's packages, and our tests (verl's archive has some, too), without our package."""
    folder = tmp_path_factory.mktemp("packages")
    site = Path(os.__file__).parent / "site-packages" if sys.prefix == sys.base_prefix else None
    site = site or next(Path(sys.prefix).glob("lib/python*/site-packages"))
    for entry in site.iterdir():
        if "gradloc" not in entry.name and entry.name != "hydra_plugins":
            (folder / entry.name).symlink_to(entry)
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


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


@pytest.mark.parametrize(
    "override",
    ["actor_rollout_ref.actor.spike_detection=True", "+gradloc=observe", "trainer.health.enable=true"],
)
def test_what_is_switched_on_ends_in_one_sentence_that_says_what_to_install(run, patched_tree, override):
    done = run(patched_tree, "-m", "verl.trainer.main_ppo", override)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "gradloc" in line.lower()]
    assert "Traceback" not in done.stderr and "`pip install .` on every node" in line
    assert override.partition("=")[0].lstrip("+") in line
