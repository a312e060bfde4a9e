# SPDX-License-Identifier: Apache-2.0
"""What pages say of verl's own code is read from that code."""

import re
from pathlib import Path

from tests.world import REPO

OBSERVE, HOW_TO = ((REPO / "docs" / name).read_text(encoding="utf-8") for name in ("observe.md", "how-to.md"))


def read_when_resumed(source: Path) -> list[str]:
    """Return what a trainer's ``_load_checkpoint`` joins to the checkpoint's folder; it lists no folder."""
    ((_, body),) = re.findall(r"\n( +)def _load_checkpoint\(self\):\n(.*?)\n\1def ", source.read_text("utf-8"), re.S)
    assert not re.search(r"listdir|glob\(|iterdir|walk|scandir", body)
    return re.findall(r"join\(global_step_folder, (.+?)\)(?=[,\n])", body)


def test_how_long_peers_wait_is_verls_own_setting(base_tree):
    (seconds,) = re.findall(
        r'timeout=datetime.timedelta\(seconds=self.config.get\("nccl_timeout", (\d+)\)\),\n\s+init_method',
        (base_tree / "verl/workers/fsdp_workers.py").read_text("utf-8").split("class CriticWorker")[0],
    )
    assert f"verl 0.7's `nccl_timeout` ({seconds} s)" in OBSERVE


def test_a_checkpoint_resumes_without_gradloc_as_verl_reads_its_own_files_alone(base_tree):
    assert "verl does not read\n`global_step_N/gradloc.json`" in HOW_TO
    read = read_when_resumed(base_tree / "verl/trainer/ppo/ray_trainer.py")
    assert set(read) == {'"actor"', "str(Role.Critic)", '"data.pt"'}
