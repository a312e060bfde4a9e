# SPDX-License-Identifier: Apache-2.0
"""Build patches/ from verl_overrides/, after copying the edits of a patched tree, if given, into it.

Each supported verl has a folder: ``base.json`` names the commit and the archive's sha256, a ``NAME.patch`` is the diff
of one of verl's files, any other file is new. The first folder's patch is gradloc.patch.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .patch import VERSION_FILE, blob_id, hidden_character, is_safe, parse, sha256_hex, split
from .refusal import Parser, Refusal, capped, guarded, quoted, say
from .tree import SEAM, STATE_FOLDER, Checkout, read_plain, remembered, resolve, stage

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".gradloc" / "base"
SOURCE_CONTEXT, PATCH_CONTEXT = 1, 3  # lines around a hunk
_PREAMBLE = """\
Description: GradLoc for verl {tag}: the seams alone; the package gradloc {version} does the rest
Origin: built by make_patch.sh from verl_overrides/; edit there, never here
Applies-To: verl {tag}, commit {commit}

"""


@dataclass(frozen=True)
class Base:
    """A supported verl: its folder of overrides, and the content of ``base.json``."""

    folder: Path
    commit: str
    sdist_sha256: str
    patch: str = "gradloc.patch"

    @property
    def tag(self) -> str:
        return self.folder.name


def bases(overrides: Path = ROOT / "verl_overrides") -> dict[str, Base]:
    """Return the bases by tag, the oldest first, whose patch is the one without a version in its name."""
    made = [Base(path.parent, **json.loads(path.read_text())) for path in sorted(overrides.glob("v*/base.json"))]
    return {
        base.tag: replace(base, patch=f"gradloc-{base.tag[1:]}.patch") if i else base for i, base in enumerate(made)
    }


def ensure_base(base: Base, cache: Path = CACHE) -> Path:
    """Return the pristine verl of a base, unpacked: complete or absent, never in between.

    Its archive comes from ``VERL_BASE_SDIST`` (paths, joined by ``:``) or through pip, once.
    """
    made = cache / (name := f"verl-{base.tag[1:]}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as folder:
        if made.is_dir():
            return made
        given = map(Path, os.environ.get("VERL_BASE_SDIST", "").split(os.pathsep))
        archive = next((path for path in given if path.name == f"{name}.tar.gz"), None) or _fetch(name, folder)
        found = sha256_hex(archive.read_bytes()) if archive.is_file() else "no such file"
        if found != base.sdist_sha256:
            raise Refusal("base-digest", archive=archive, expected=base.sdist_sha256, found=found)
        with tarfile.open(archive, "r:gz") as tar:  # every byte of it is known
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            tar.extractall(folder)
        try:
            return (Path(folder) / name).rename(made)
        except OSError:
            if not made.is_dir():  # else another process has done so, with the same
                raise
    return made


def _fetch(name: str, folder: str) -> Path:
    command = "-m pip download --quiet --no-deps --disable-pip-version-check --no-binary verl --dest".split()
    command = [sys.executable, *command, folder, name.replace("-", "==")]
    if (done := subprocess.run(command, capture_output=True, text=True, cwd=folder)).returncode:
        raise Refusal("base-pip", package=command[-1], name=name, found=done.stderr.strip()[-200:])
    return Path(folder) / f"{name}.tar.gz"


def file_diff(path: str, before: bytes | None, after: bytes, context: int = PATCH_CONTEXT) -> str:
    """Return the section that turns ``before`` into ``after``, or adds it, in git's format."""
    lines = list(difflib.unified_diff(split((before or b"").decode()), split(after.decode()), n=context))
    if before is None:
        head = f"new file mode 100644\nindex {'0' * 40}..{blob_id(after)}\n--- /dev/null\n"
    else:
        head = f"index {blob_id(before)}..{blob_id(after)} 100644\n--- a/{path}\n"
    return f"diff --git a/{path} b/{path}\n{head}+++ b/{path}\n" + "".join(lines[2:])


def check_text(path: str, data: bytes) -> bytes:
    """Return ``data``, the content of a file for verl; refuse what a patch must not contain."""
    text = data.decode("utf-8", "replace")
    if text.encode() != data or text[-1:] != "\n" or hidden_character(text) or not is_safe(path):
        raise Refusal("build-text", path=path, hidden=hidden_character(text) or "no line")
    return data


def patched_files(base: Base, tree: Path) -> dict[str, bytes]:
    """Return path -> content of verl's files with the seams, and of the new ones."""
    made: dict[str, bytes] = {}
    for place in sorted(path for path in base.folder.glob("*/**/*") if path.is_file() and path.suffix != ".pyc"):
        made[place.relative_to(base.folder).as_posix()] = place.read_bytes()
    for source in [path for path in made if path.endswith(".patch")]:
        for path, file in parse(made.pop(source)).items():
            made[path] = file.forward(read_plain(tree, path).content)
    return {path: check_text(path, data) for path, data in sorted(made.items())}


def compose(overrides: Path, version: str) -> dict[str, bytes]:
    """Return name -> content of the files in patches/."""
    files, entries = dict[str, bytes](), list[dict[str, str]]()
    for base in bases(overrides).values():
        made = patched_files(base, tree := ensure_base(base))
        if (said := re.findall(rb'^VERSION = "(.*?)"', made.get(SEAM, b""), re.M)) not in ([], [version.encode()]):
            raise Refusal("build-version", seam=SEAM, said=said[0].decode(), version=version)
        sections = [file_diff(path, read_plain(tree, path).content, data) for path, data in made.items()]
        patch = (_PREAMBLE.format(tag=base.tag, commit=base.commit, version=version) + "".join(sections)).encode()
        for path, file in parse(patch).items():
            file.forward(read_plain(tree, path).content)
        sha256 = sha256_hex(patch)
        entries.append({"base": base.tag, "commit": base.commit, "name": base.patch, "sha256": sha256})
        files |= {base.patch: patch, f"{base.patch}.sha256": f"{sha256}  {base.patch}\n".encode()}
    return files | {"manifest.json": (json.dumps({"version": version, "patches": entries}, indent=1) + "\n").encode()}


def take(target: Checkout, base: Base, patch: Path, also: list[str]) -> Iterator[str]:
    """Take the files of a patched tree that the patch touches, and ``also`` these, into the sources of its base.

    Its git history does not matter. A file that was edited here since the tree was patched, and there, is refused, and
    so is one that the patch is not on: no seam is ever dropped. Yield what was taken, and what was left out.
    """
    tree, lacking = ensure_base(base), list[str]()
    ours, given = patched_files(base, tree), remembered(target.root)[0]
    files = parse(given or patch.read_bytes()) if given or patch.is_file() else {}
    for path in sorted({*ours, *also}):
        found, verls = read_plain(target.root, path), read_plain(tree, path)
        mine, was = ours.get(path, verls.content), files[path].after if path in files else verls.blob
        if found == verls and mine != verls.content:
            lacking += [path] if path in files else []
        elif found.content is None:
            raise Refusal("take-deleted", path=path, root=target.root, tag=base.tag, found=found.obstacle)
        elif found.content != mine and found.blob != was:
            if mine is not None and blob_id(mine) != was:
                here, there = (split(text.decode("utf-8", "replace")) for text in (mine, found.content))
                lines = [line.rstrip() for line in difflib.unified_diff(here, there, n=0)]
                raise Refusal("take-both-sides", path=path, lines=lines)
            before, after = verls.content, check_text(path, found.content)
            diff = after if before is None else file_diff(path, before, after, SOURCE_CONTEXT).encode()
            write_file(base.folder / (path if before is None else f"{path}.patch"), diff)
            yield f"taken: {path}"
    if lacking:
        include = " ".join(f"--include={path}" for path in lacking)
        raise Refusal("take-unpatched", n=len(lacking), root=target.root, include=include, patch=patch, lines=lacking)
    names = {place.relative_to(root).as_posix() for root in (tree, target.root) for place in (root / "verl").rglob("*")}
    for path in sorted(name for name in names - {*ours, *also, VERSION_FILE} if not re.search(r"/(\.|__pyc)", name)):
        if read_plain(target.root, path).blob != read_plain(tree, path).blob:
            is_there = os.path.lexists(target.root / path)
            yield f"left out: {path}   ({f'--also {quoted(path)} takes it' if is_there else 'deleted there'})"


def write_file(path: Path, data: bytes) -> bool:
    """Write a file, whole or not at all; return False if it holds that already."""
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    made = Parser(prog="bash make_patch.sh", description=__doc__, allow_abbrev=False)
    command, add = made.add_mutually_exclusive_group(), made.add_argument
    command.add_argument("--repo", metavar="CHECKOUT", help="first take the edits of this patched tree")
    command.add_argument("--check", action="store_true", help="write nothing; fail if patches/ is not what it would be")
    command.add_argument("--base-tree", metavar="TAG", help="print the folder of a pristine verl, fetched if need be")
    add("--also", action="append", default=[], metavar="PATH", help="with --repo: a further file of verl's")
    add("--debug", action="store_true", help="show a traceback on an error")
    add("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(made, made.parse_args(given)), given)


def _run(made: Parser, options: argparse.Namespace) -> None:
    overrides, patches = options.root / "verl_overrides", (options.root / "patches").resolve()
    version = re.findall(r'^__version__ = "(.+)"', (options.root / "gradloc/__init__.py").read_text(), re.M)[0]
    known, tag, target, said = bases(overrides), options.base_tree, None, list[str]()
    if tag is not None and tag not in known:
        made.error(f"--base-tree {tag} is none of {', '.join(known)}")
    if options.also and (options.repo is None or not all(map(is_safe, options.also))):
        made.error("--also needs --repo, and the path of a file in verl/, as seen from the checkout")
    if tag is not None:
        return say(str(ensure_base(known[tag])))
    with tempfile.TemporaryDirectory() as folder:  # nothing is taken of what then cannot be built
        copy = Path(shutil.copytree(overrides, Path(folder) / overrides.name))
        if options.repo is not None:
            target = resolve(options.repo, True, "bash make_patch.sh")
            base = bases(copy).get(f"v{target.version.removesuffix('.dev')}")
            if base is None:
                raise Refusal("take-base", version=target.version, known=", ".join(known))
            said = [*take(target, base, patches / base.patch, options.also)]
        built = compose(copy, version)
        for place in (path for path in copy.rglob("*") if path.is_file() and target):
            write_file(overrides / place.relative_to(copy), place.read_bytes())
    if target and base and (target.root / STATE_FOLDER).exists():
        before = {f"now/{path}": read_plain(ensure_base(base), path).content for path in parse(built[base.patch])}
        with contextlib.suppress(OSError):  # it may be another user's; with it, the next edit is not taken for this one
            stage(target.root, "applied", before | {"patch": built[base.patch]})
    for line in capped(said):
        say(line)
    names = {path.name for path in patches.iterdir()} if patches.is_dir() else set()
    for name in sorted(built.keys() | names) if options.check else ():
        found, wanted = (patches / name).read_bytes() if name in names else b"", built.get(name, b"")
        if found != wanted or name not in built:
            sides = [text.decode("utf-8", "replace").splitlines() for text in (found, wanted)]
            lines = [*difflib.unified_diff(sides[0], sides[1], f"patches/{name}", "built", lineterm="", n=1)]
            raise Refusal("build-stale", name=name, lines=lines)
    if options.check:
        return say("patches/ is what its sources build")
    written = [name for name, data in built.items() if write_file(patches / name, data)]
    for name in names - built.keys():
        (patches / name).unlink()
    return say(f"built: {', '.join(written)}" if written else "patches/ is unchanged")
