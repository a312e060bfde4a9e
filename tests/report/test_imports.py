# SPDX-License-Identifier: Apache-2.0
"""The report runs where there is neither torch nor a trainer."""

import subprocess
import sys

from tests.report.builder import REPO, make_event, make_metrics, write_run

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "verl", "trl", "ray", "tensordict", "transformers", "wandb"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Block())
from gradloc.report.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_report_is_written_with_torch_and_trainers_absent(tmp_path):
    folder = write_run(tmp_path / "run", [make_event()], metrics=make_metrics())
    command = [sys.executable, "-c", BLOCK, str(folder), "-o", str(tmp_path / "report.html")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
