# SPDX-License-Identifier: Apache-2.0
"""Gets the pinned verl: the source archive of ``verl==0.7.0``, verified before it is unpacked.

The archive comes from ``VERL_BASE_SDIST`` (a path) or through pip, once; the unpacked tree is kept
under ``.gradloc/base/``. ``python -m patchkit.build.base`` prints the path of the tree.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from ..command import guarded, say
from ..errors import DownloadError, IntegrityError
from ..patch.digest import sha256_hex

REQUIREMENT = "verl==0.7.0"
FOLDER = "verl-0.7.0"
ARCHIVE = FOLDER + ".tar.gz"
SHA256 = "eba2e75be72f809b97ada9bb35479fd45999ca2c94f45eb7868def59b83cb9db"
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".gradloc" / "base"
MAX_FILES, MAX_UNPACKED_BYTES = 2000, 64 * 2**20


def ensure_base(cache: Path = DEFAULT_CACHE) -> Path:
    """Returns a folder with the pristine pinned tree (``verl/`` in it), fetching it if need be.

    Args:
        cache: where the tree is kept; the folder in it is complete or absent, never in between.

    Raises:
        DownloadError: if pip cannot get the archive, or the named archive cannot be read.
        IntegrityError: if the archive is not the pinned one.
    """
    tree = cache / FOLDER
    if not tree.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as scratch:
            archive = _archive(Path(scratch))
            data = archive.read_bytes()
            if sha256_hex(data) != SHA256:
                raise IntegrityError("base-digest", path=archive.name, expected=SHA256, found=sha256_hex(data))
            _unpack(archive, Path(scratch) / "tree")
            _move(Path(scratch) / "tree" / FOLDER, tree)
    return tree


def _archive(scratch: Path) -> Path:
    named = os.environ.get("VERL_BASE_SDIST")
    if named:
        if not Path(named).is_file():
            raise DownloadError("base-named-missing", path=named)
        return Path(named)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-binary", "verl", "--dest", str(scratch)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    archive = scratch / ARCHIVE
    if done.returncode or not archive.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise DownloadError("base-pip", requirement=REQUIREMENT, found=said[-1] if said else "")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    """Writes the archive's plain files below ``folder``; any other kind of entry is refused."""
    total = count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if parts[:1] != (FOLDER,) or ".." in parts or not (member.isreg() or member.isdir()):
                raise IntegrityError("base-entry", path=member.name)
            total, count = total + member.size, count + 1
            if total > MAX_UNPACKED_BYTES or count > MAX_FILES:
                raise IntegrityError("base-entry", path=member.name)
            target = folder.joinpath(*parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with tar.extractfile(member) as source, target.open("xb") as sink:
                shutil.copyfileobj(source, sink)


def _move(source: Path, target: Path) -> None:
    """Renames ``source`` to ``target``; another process may have done so first, with the same."""
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m patchkit.build.base", description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_CACHE, help="where to keep the tree (%(default)s)")
    options = parser.parse_args(arguments)

    def run() -> int:
        say(str(ensure_base(options.output)))
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
