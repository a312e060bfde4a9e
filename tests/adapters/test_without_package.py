# SPDX-License-Identifier: Apache-2.0
"""A patched verl without our package: with all off it is verl, with something on it ends in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full

DISTRIBUTED = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
"""
TRAIN = f"""
{DISTRIBUTED}
import verl.trainer.main_ppo
from tests.world.spikes import train
found = train(["actor_rollout_ref.actor.use_kl_loss=true"], "x", num_steps=3)
ours = [name for name in sys.modules if "gradloc" in name]
print(found["weights"], sorted(found["metrics"]), ours)
with open("gradloc.py", "w") as file:
    file.write("__version__ = '0.3.0'")
sys.argv[1:] = ["actor_rollout_ref.actor.spike_detection=True"]
verl.trainer.main_ppo.main()
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


@pytest.mark.slow
def test_it_trains_bit_for_bit_as_unpatched_verl_and_another_version_of_the_package_ends_in_one_sentence(
    run, worlds, patched_tree, dump_dir
):
    overrides = ["actor_rollout_ref.actor.use_kl_loss=true"]
    (base,) = worlds(1, is_patched=False).run("spikes.train", overrides=overrides, dump_dir=dump_dir, num_steps=3)
    done = run(patched_tree, "-W", "ignore", "-c", TRAIN)
    assert "has 0.3.0" in sentence_of(done)
    trained = f"{base['weights']} {sorted(base['metrics'])} ['verl.utils.gradloc_seam']"
    assert done.stdout.strip().splitlines()[-1] == trained and len(base["weights"]) == 64


ACTOR = "actor_rollout_ref.actor"
IN_A_FILE = "--config-dir . --config-name mine"
ON = {f"{ACTOR}.spike_detection=True": f"{ACTOR}.spike_detection", "+gradloc=observe": "+gradloc"}
ON |= {"trainer.health.enable=true": "trainer.health.enable", IN_A_FILE: f"{ACTOR}.spike_detection"}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ON)
def test_what_is_switched_on_ends_in_one_sentence_that_says_what_to_install(run, patched_tree, tmp_path, arguments):
    mine = f"defaults: [ppo_trainer, _self_]\n{ACTOR.replace('.', ': {')}: {{spike_detection: true}}}}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    done = run(patched_tree, "-m", "verl.trainer.main_ppo", *arguments.split())
    assert sentence_of(done).startswith(f"{ON[arguments]} needs the package gradloc")
    assert "has none" in done.stderr


def sentence_of(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "gradloc" in line.lower()]
    assert "`pip install .` on every node" in line
    return line
