# SPDX-License-Identifier: Apache-2.0
"""The report runs where there is neither torch nor verl."""

import subprocess
import sys

from tests.report.builder import REPO, make_event, make_metrics, write_run

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "verl", "ray", "tensordict", "transformers", "wandb"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Block())
from gradloc.report.cli import main
code = main(sys.argv[1:])
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"torch", "verl"}
sys.exit(code)
"""


def test_a_report_is_written_with_torch_and_verl_absent(tmp_path):
    folder = write_run(tmp_path / "run", [make_event()], metrics=make_metrics())
    out = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, str(folder), "-o", str(out)], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert out.is_file()


def test_no_module_names_torch_or_verl_as_an_import():
    for path in (REPO / "gradloc/report").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in ("torch", "verl", "patchkit"), path
