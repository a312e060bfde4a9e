# SPDX-License-Identifier: Apache-2.0
"""Gets the verls that there are patches for: their released source archives, known by their sha256.

An archive comes from ``VERL_BASE_SDIST`` (paths, joined by ``:``) or through pip, once, and is kept unpacked under
``.gradloc/base/``. ``python -m patchkit.build.base`` prints the path of a tree.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ..command import guarded, say
from ..errors import DownloadError, IntegrityError
from ..patch.content import sha256_hex
from ..patch.manifest import Base

V070 = Base("v0.7.0", "f9c855f7cf04d603c9546bc01776c74806a879c1")
V071 = Base("v0.7.1", "bec9ef74768dd201881cd4e54cd0385e87caae27")
PINNED = {
    V070: "eba2e75be72f809b97ada9bb35479fd45999ca2c94f45eb7868def59b83cb9db",
    V071: "0c208c03d5dc48f8262192355f403d74dae6574daebe68f2c4d28f021c4248d0",
}
"""The verls, with the sha256 of each archive. What the first has serves the others where verl's files are the same."""
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".gradloc" / "base"


def ensure_base(tag: str = "v0.7.0", cache: Path = DEFAULT_CACHE) -> Path:
    """Returns a folder with the pristine verl of a pinned tag (``verl/`` in it), fetching it if need be.

    The folder, in ``cache``, is complete or absent, never in between. What is not the pinned archive is refused.
    """
    pinned = next(digest for base, digest in PINNED.items() if base.tag == tag)
    folder = f"verl-{tag.removeprefix('v')}"
    tree = cache / folder
    if not tree.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as scratch:
            archive = _named(pinned, folder) or _fetched(folder, Path(scratch))
            found = sha256_hex(archive.read_bytes())
            if found != pinned:
                what, cause = f"the archive {archive} is not verl's released one", "It was changed, or is another."
                next_ = "Delete it and fetch it again."
                raise IntegrityError("base-digest", what, cause, next_, expected=pinned, found=found)
            with tarfile.open(archive, "r:gz") as tar:  # every byte of it is known
                tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                tar.extractall(Path(scratch) / "tree")
            try:
                (Path(scratch) / "tree" / folder).rename(tree)
            except OSError:
                if not tree.is_dir():  # else another process has done so, with the same
                    raise
    return tree


def _named(pinned: str, folder: str) -> Path | None:
    """The archive that ``VERL_BASE_SDIST`` names for this verl, by content, else by its file's name."""
    paths = [Path(path) for path in os.environ.get("VERL_BASE_SDIST", "").split(os.pathsep) if path]
    for path in paths:
        if not path.is_file():
            what, cause = f"VERL_BASE_SDIST names {path}, which is no file", "The variable is left over or misspelt."
            raise DownloadError("base-named-missing", what, cause, "unset VERL_BASE_SDIST   (then pip fetches it)")
    by_content = [path for path in paths if sha256_hex(path.read_bytes()) == pinned]
    return next(iter(by_content + [path for path in paths if path.name == f"{folder}.tar.gz"]), None)


def _fetched(folder: str, scratch: Path) -> Path:
    requirement = folder.replace("-", "==")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--no-binary", "verl", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
    archive = scratch / f"{folder}.tar.gz"
    if done.returncode or not archive.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()] or [""]
        what, cause = f"pip could not fetch the source archive of {requirement}", "No network, or no such package."
        next_ = f"VERL_BASE_SDIST=PATH/{folder}.tar.gz, with a copy fetched elsewhere"
        raise DownloadError("base-pip", what, cause, next_, found=said[-1])
    return archive


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m patchkit.build.base", description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_CACHE, help="where to keep the tree (%(default)s)")
    parser.add_argument("--base", default="v0.7.0", choices=[base.tag for base in PINNED], help="which verl")
    options = parser.parse_args(arguments)
    return guarded(lambda: say(str(ensure_base(options.base, options.output))))


if __name__ == "__main__":
    sys.exit(main())
