# SPDX-License-Identifier: Apache-2.0
"""Builds patches/ from verl_overrides/, after taking a patched tree's edits into it where one is named.

A folder for each verl that there is a patch for, ``verl_overrides/v0.7.0/``: ``base.json`` names the commit and the
archive's sha256, ``NAME.patch`` is the diff of one of verl's files, and any other file is new to verl. A diff in the
first folder also serves the later ones, as long as it applies there.
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
from dataclasses import dataclass, replace
from pathlib import Path

from .language import (
    ABSENT,
    CONTEXT_LINES,
    FilePatch,
    Hunk,
    apply_hunks,
    blob_id,
    check_path,
    hidden_character,
    misfit,
    parse,
    sha256_hex,
    split,
)
from .refusal import INTEGRITY, NETWORK, STATE, USAGE, Parser, Refusal, capped, guarded, quoted, say
from .tree import SEAM, VERSION_FILE, Checkout, FileState, read_plain, read_regular, resolve
from .write import APPLIED

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".gradloc" / "base"
_PREAMBLE = """\
Description: GradLoc for verl {tag}: the seams alone; the package gradloc {version} does the rest
Origin: built by make_patch.sh from verl_overrides/; edit there, never here
Applies-To: verl {tag}, commit {commit}

"""


@dataclass(frozen=True)
class Base:
    """A verl that there is a patch for: its folder of overrides, and what ``base.json`` says."""

    folder: Path
    commit: str
    sdist_sha256: str

    @property
    def tag(self) -> str:
        return self.folder.name

    @property
    def shared(self) -> Path:
        """The first base's folder."""
        return sorted(self.folder.parent.glob("v*"))[0]


def bases(overrides: Path = ROOT / "verl_overrides") -> dict[str, Base]:
    """The bases by tag, the oldest first."""
    return {
        path.parent.name: Base(path.parent, **json.loads(path.read_text()))
        for path in sorted(overrides.glob("v*/base.json"))
    }


def ensure_base(base: Base, cache: Path = CACHE) -> Path:
    """The pristine verl of a base, unpacked: complete or absent, never in between. What has another sha256 is refused.

    Its archive comes from ``VERL_BASE_SDIST`` (paths, joined by ``:``) or through pip, once.
    """
    name = f"verl-{base.tag.removeprefix('v')}"
    if not (cache / name).is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as folder:
            given = [Path(path) for path in os.environ.get("VERL_BASE_SDIST", "").split(os.pathsep) if path]
            for path in given:
                if not path.is_file():
                    what, cause = f"VERL_BASE_SDIST names {path}, and there is no such file", "It is misspelt."
                    raise Refusal(USAGE, "base-path", what, cause, f"VERL_BASE_SDIST=PATH/{name}.tar.gz")
            archive = next((path for path in given if path.name == f"{name}.tar.gz"), None) or _fetch(name, folder)
            if (found := sha256_hex(archive.read_bytes())) != base.sdist_sha256:
                what, cause = f"the archive {archive} is not verl's released one", "It was changed, or is another."
                ids = {"expected": base.sdist_sha256, "found": found}
                raise Refusal(INTEGRITY, "base-digest", what, cause, "Delete it and fetch it again.", **ids)
            with tarfile.open(archive, "r:gz") as tar:  # every byte of it is known
                tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                tar.extractall(Path(folder) / "tree")
            try:
                (Path(folder) / "tree" / name).rename(cache / name)
            except OSError:
                if not (cache / name).is_dir():  # else another process has done so, with the same
                    raise
    return cache / name


def _fetch(name: str, folder: str) -> Path:
    requirement, archive = name.replace("-", "=="), Path(folder) / f"{name}.tar.gz"
    command = "-m pip download --quiet --no-deps --disable-pip-version-check --no-binary verl --dest".split()
    command = [sys.executable, *command, folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode or not archive.is_file():
        what, cause = f"pip could not fetch the source archive of {requirement}", "No network, or no such package."
        next_ = f"VERL_BASE_SDIST=PATH/{name}.tar.gz, with a copy fetched elsewhere"
        found = [line for line in done.stderr.splitlines() if line.strip().lower().startswith("error")]
        raise Refusal(NETWORK, "base-pip", what, cause, next_, found=found[0].strip() if found else None)
    return archive


def seam(path: str, before: bytes | None, after: bytes) -> str:
    """The section that turns ``before`` into ``after``, or adds it: as git writes it, the same on every machine."""
    lines = list(difflib.unified_diff(split((before or b"").decode()), split(after.decode()), n=CONTEXT_LINES))
    head, old = f"index {blob_id(before or b'')}..{blob_id(after)} 100644\n", f"a/{path}"
    if before is None:
        head, old = f"new file mode 100644\nindex {ABSENT}..{blob_id(after)}\n", "/dev/null"
    return f"diff --git a/{path} b/{path}\n{head}--- {old}\n+++ b/{path}\n" + "".join(lines[2:])


def check_text(path: str, data: bytes) -> str:
    """The text of a file that verl is to have; what a patch must not carry is refused."""
    check_path(path)
    text = data.decode("utf-8", "replace")
    problems = {"is not UTF-8 text": text.encode() != data, "is empty": not data, "has a carriage return": "\r" in text}
    problems |= {
        "does not end in a newline": data[-1:] != b"\n",
        "has a hidden character": bool(hidden_character(text)),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise Refusal(
                INTEGRITY, "build-text", f"{path} {problem}", "An editor wrote it.", "Write it anew, as text with LF."
            )
    return text


def results(base: Base, tree: Path, is_strict: bool = True, only: str = "") -> dict[str, bytes]:
    """What the sources make of the base's files, and of those that it gets, by path.

    A seam that does not fit is refused; where ``is_strict`` is off, such a file is the base's own.
    """
    made: dict[str, bytes] = {}
    for folder in dict.fromkeys((base.shared, base.folder)):
        for place in sorted(path for path in folder.glob("*/**/*") if path.is_file() and path.suffix != ".pyc"):
            path = place.relative_to(folder).as_posix()
            verls = path.removesuffix(".patch")
            if (folder != base.folder and (base.folder / path).is_file()) or only not in ("", verls):
                continue
            if verls == path:
                made[path] = place.read_bytes()
                continue
            file, there = parse(place.read_bytes()).get(verls), read_plain(tree, verls).content
            if file is None or there is None:
                source = place.relative_to(folder.parents[1])
                what, cause = f"{source} is no seam of a file that verl {base.tag} has", "Renamed, or verl moved on."
                raise Refusal(INTEGRITY, "build-seam", what, cause, "Remove it, or make it anew by --repo CHECKOUT.")
            try:
                made[verls] = file.forward(there) if blob_id(there) == file.before else relocated(file, there)
            except Refusal:
                if is_strict:
                    raise
                made[verls] = there
    return made


def relocated(file: FilePatch, data: bytes) -> bytes:
    """The result of ``file`` on another base than its own; refuses unless each hunk fits at just one place."""
    lines, hunks, at = split(data.decode("utf-8")), list[Hunk](), 0
    for number, hunk in enumerate(file.hunks, start=1):
        count = len(hunk.old)
        places = [start for start in range(at, len(lines) - count + 1) if lines[start : start + count] == hunk.old]
        if len(places) != 1:
            matcher = difflib.SequenceMatcher(None, lines, hunk.old, autojunk=False)
            near = matcher.find_longest_match(0, len(lines), 0, count)
            start = max(near.a - near.b, 0)
            raise misfit(file.path, number, hunk, [] if places else lines[start : start + count])
        hunks.append(replace(hunk, start=places[0]))
        at = places[0] + count
    return apply_hunks(file.path, tuple(hunks), data)


def compose(overrides: Path, version: str) -> dict[str, bytes]:
    """What patches/ must hold, by name."""
    files, entries = dict[str, bytes](), list[dict[str, str]]()
    for base in bases(overrides).values():
        tree = ensure_base(base)
        made = {path: check_text(path, after).encode() for path, after in results(base, tree).items()}
        seam_says = re.search(rb'^VERSION = "(.*?)"', made.get(SEAM, b""), re.M)
        if seam_says and (said := seam_says[1].decode()) != version:
            what = f"{SEAM} is for gradloc {said}, and this is {version}"
            cause, next_ = "The version was changed in one place.", f'VERSION = "{version}" there'
            raise Refusal(INTEGRITY, "build-version", what, cause, next_)
        sections = [seam(path, read_plain(tree, path).content, made[path]) for path in sorted(made)]
        preamble = _PREAMBLE.format(tag=base.tag, commit=base.commit, version=version)
        patch = (preamble + "".join(sections)).encode()
        for path, file in parse(patch).items():
            file.forward(read_plain(tree, path).content or b"")
        name = f"verl-{base.tag.removeprefix('v')}.patch"
        entries.append({"base": base.tag, "commit": base.commit, "name": name, "sha256": sha256_hex(patch)})
        files[name] = patch
    manifest = json.dumps({"version": version, "patches": entries}, indent=1) + "\n"
    return files | {"manifest.json": manifest.encode()}


def take(target: Checkout, overrides: Path, patches: Path, also: list[str]) -> list[str]:
    """Takes the files of a patched tree that the patch touches, and ``also`` these, into the sources of its base.

    The tree's git history does not matter: its files are compared with the released verl's. A file that was edited here
    since the tree was patched, and there, is refused, and so is one that the patch is not on: no seam is ever dropped.
    Another base keeps what it has where the edit does not fit it. Returns what to say: of what was taken, of such
    bases, and of other files that differ from verl's, which are left out.
    """
    known = bases(overrides)
    base = known.get(f"v{target.version.removesuffix('.dev')}")
    if base is None:
        what, cause = f"{target.root} is verl {target.version}", "There is no folder of overrides for it."
        raise Refusal(STATE, "take-base", what, cause, f"Make one with a base.json; there are {', '.join(known)}.")
    results_of = {one: results(one, ensure_base(one), is_strict=False) for one in known.values()}
    tree, ours, edits, lacking = ensure_base(base), results_of[base], dict[str, bytes](), list[str]()
    patch = patches / f"verl-{base.tag[1:]}.patch"
    record = next((place for place in (target.state_folder / APPLIED, patch) if place.is_file()), None)
    given = {path: blob_id(data) for path, data in ours.items()}
    if record is not None:
        given = {path: file.after for path, file in parse(read_regular(record)).items()}
    for path in sorted({*ours, *also}):
        found, mine, verls = read_plain(target.root, path), ours.get(path), read_plain(tree, path)
        if found == verls and mine != verls.content:
            lacking += [path] if record is not None and path in given and mine is not None else []
            continue
        if found.content is None:
            what, cause = f"{path} is not in {target.root}", found.obstacle or "It was deleted, or is misspelt."
            raise Refusal(STATE, "take-deleted", what, cause, f"Put it back, from verl {base.tag}.")
        if (mine is not None and blob_id(mine) == found.blob) or found.blob == given.get(path):
            continue
        if mine not in (None, verls.content) and blob_id(mine) != given.get(path):
            here, there = (split(text.decode("utf-8", "replace")) for text in (mine, found.content))
            lines = [line.rstrip() for line in difflib.unified_diff(here, there, n=0)]
            what, cause = f"{path} was edited there and in verl_overrides/, differently", "Others took edits since."
            next_ = "Bring both together in the checkout, undo the one here, run this again."
            raise Refusal(STATE, "take-both-sides", what, cause, next_, lines=lines)
        edits[path] = check_text(path, found.content).encode()
    if lacking:
        is_off = len(lacking) == sum(data != read_plain(tree, path).content for path, data in ours.items())
        what = f"the patch is not on {target.root}" if is_off else f"the patch is off {len(lacking)} of its files there"
        cause, next_ = "It was stashed or restored by git.", f"python apply_patch.py {target.option}"
        if not is_off:
            only = " ".join(f"--include={quoted(path)}" for path in lacking)
            next_ = f"git -C {quoted(target.root)} apply {only} {quoted(patch.resolve())}   "
            next_ += "(to drop a seam, remove its source in verl_overrides/ by hand)"
        raise Refusal(STATE, "take-unpatched", what, cause, next_, lines=lacking)
    said = [f"taken: {path}" for path in edits]
    for path, content in edits.items():
        _store(base, path, content)
    for one, before in results_of.items():
        for path in edits.keys() & before.keys() if one != base else ():
            with contextlib.suppress(Refusal):
                results(one, ensure_base(one), only=path)
                continue
            if before[path] == read_plain(ensure_base(one), path).content:
                continue  # its own diff did not fit before: building says so
            _store(one, path, before[path])
            said.append(f"{path} of verl {one.tag} stays as it is: the edit does not fit it")
    names = {place.relative_to(root).as_posix() for root in (tree, target.root) for place in (root / "verl").rglob("*")}
    for path in sorted(names - {*ours, *also, VERSION_FILE}):
        verls, found = read_plain(tree, path), read_plain(target.root, path)
        if found.blob != verls.blob and not re.search(r"/(\.|__pycache__/)", path):
            is_gone = found == FileState(None)
            hint = "deleted there, which no patch of ours does" if is_gone else f"--also {quoted(path)} takes it"
            said.append(f"left out: {path}   ({hint})")
    return said


def _store(base: Base, path: str, content: bytes) -> None:
    """Where the first base has the very same file, its source is that base's; else the base's own."""
    before = read_plain(ensure_base(base), path).content
    name = path if before is None else f"{path}.patch"
    data, shared = (content if before is None else seam(path, before, content).encode()), base.shared / name
    serves = before is None or (shared.is_file() and parse(shared.read_bytes())[path].before == blob_id(before))
    write_file(shared if serves and not (base.folder / name).is_file() else base.folder / name, data)


def write_file(path: Path, data: bytes) -> bool:
    """Writes a file, whole or not at all; False if it holds that already."""
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    made = Parser(prog="bash make_patch.sh", description=__doc__, allow_abbrev=False)
    command = made.add_mutually_exclusive_group()
    command.add_argument("--repo", metavar="CHECKOUT", help="first take the edits of this patched tree")
    command.add_argument("--check", action="store_true", help="write nothing; fail if patches/ is not what it would be")
    command.add_argument("--base-tree", metavar="TAG", help="print the folder of a pristine verl, fetched if need be")
    made.add_argument(
        "--also", action="append", default=[], metavar="PATH", help="with --repo: a further file of verl's"
    )
    made.add_argument("--debug", action="store_true", help="show a traceback on an error")
    made.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(made, made.parse_args(given)), given)


def _run(made: Parser, options: argparse.Namespace) -> None:
    overrides, patches = options.root / "verl_overrides", options.root / "patches"
    version = re.findall(r'^__version__ = "(.+)"', (options.root / "gradloc/__init__.py").read_text(), re.M)[0]
    if options.base_tree is not None:
        known = bases(overrides)
        if options.base_tree not in known:
            made.error(f"--base-tree {options.base_tree} is none of {', '.join(known)}")
        return say(str(ensure_base(known[options.base_tree])))
    if options.also and options.repo is None:
        made.error("--also needs --repo")
    for path in options.also:
        try:
            check_path(path)
        except Refusal:
            made.error(f"--also {path} is no path of a file in verl/, as seen from the checkout")
    if options.repo is not None:
        target = resolve(options.repo, True, "bash make_patch.sh")
        with tempfile.TemporaryDirectory() as folder:  # nothing is taken of what then cannot be built
            copy = Path(shutil.copytree(overrides, Path(folder) / overrides.name))
            said, built = take(target, copy, patches, options.also), compose(copy, version)
            for place in (path for path in copy.rglob("*") if path.is_file()):
                write_file(overrides / place.relative_to(copy), place.read_bytes())
        record, patch = target.state_folder / APPLIED, built[f"verl-{target.version.removesuffix('.dev')}.patch"]
        if all(read_plain(target.root, path).blob == file.after for path, file in parse(patch).items()):
            # It may be another user's; with it, the next edit is not taken for this one.
            with contextlib.suppress(OSError):
                if record.is_file():
                    write_file(record, patch)
        for line in capped(said):
            say(line)
    else:
        built = compose(overrides, version)
    names = {path.name for path in patches.iterdir()} if patches.is_dir() else set()
    if options.check:
        for name in sorted(built.keys() | names, key=lambda name: (name == "manifest.json", name)):
            found = (patches / name).read_bytes() if name in names else b""
            if built.get(name) != found:
                before, after = (text.decode("utf-8", "replace").splitlines() for text in (found, built.get(name, b"")))
                lines = list(difflib.unified_diff(before, after, f"patches/{name}", "built", lineterm="", n=1))
                what = f"patches/{name} is not what its sources build"
                cause = "One was edited and the other not rebuilt."
                raise Refusal(INTEGRITY, "build-stale", what, cause, "bash make_patch.sh", lines=lines)
        return say("patches/ is what its sources build")
    written = [name for name, data in built.items() if write_file(patches / name, data)]
    for name in names - built.keys():
        (patches / name).unlink()
    return say(f"built: {', '.join(written)}" if written else "patches/ is unchanged")
