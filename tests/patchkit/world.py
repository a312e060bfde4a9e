# SPDX-License-Identifier: Apache-2.0
"""A small verl to patch: a base tree, a result, and a patches/ folder that leads from one to the
other. Its seams are made with difflib, so the applier is tested on diffs that git did not write.
"""

import contextlib
import difflib
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.apply import cli
from patchkit.build import base as bases
from patchkit.build import cli as regenerate
from patchkit.build.cli import write_file
from patchkit.build.sources import Folders, Sources, compose
from patchkit.patch.content import blob_id
from patchkit.patch.manifest import Base, remembered

V070, V071 = bases.V070, bases.V071
ACTOR = "verl/workers/actor/dp_actor.py"
TRAINER = "verl/trainer/ray_trainer.py"
INIT = "verl/gradloc/__init__.py"
NEW = "verl/gradloc/hook.py"
DEEP = "verl/gradloc/search/bisect.py"


def numbered(label: str, count: int = 40) -> str:
    """Returns a text of distinct lines."""
    return "".join(f"{label} line {number}\n" for number in range(1, count + 1))


BASE = {
    "verl/__init__.py": "version = 1\n",
    "verl/version/version": "0.7.0\n",
    ACTOR: numbered("actor"),
    TRAINER: numbered("trainer", 60),
    "verl/utils/other.py": "untouched = True\n",
}
RESULT = BASE | {
    ACTOR: BASE[ACTOR].replace("actor line 10\n", "actor line 10\nhook()\n"),
    TRAINER: BASE[TRAINER].replace("trainer line 7\n", "").replace("line 50\n", "line fifty\n"),
    INIT: '__version__ = "0.1.0"\n',
    NEW: "def hook():\n    return None\n",
    DEEP: numbered("bisect", 5),
}
OLDER = BASE | {
    ACTOR: BASE[ACTOR].replace("actor line 12\n", "actor line twelve\n"),
    INIT: '__version__ = "0.0.9"\n',
    NEW: "def hook():\n    return 'older'\n",
    "verl/gradloc/gone.py": "gone = True\n",
}


def seam(path: str, before: str, after: str) -> str:
    """Returns the section that turns ``before`` into ``after``, by difflib."""
    lines = difflib.unified_diff(split(before), split(after), n=3)
    body = "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in list(lines)[2:]
    )
    ids = f"{blob_id(before.encode())}..{blob_id(after.encode())}"
    return f"diff --git a/{path} b/{path}\nindex {ids} 100644\n--- a/{path}\n+++ b/{path}\n{body}"


def split(text: str) -> list[str]:
    """Returns the lines of ``text`` with their ends; a line feed is the only line end."""
    lines = [line + "\n" for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "\n" else [*lines[:-1], lines[-1][:-1]]


def sources(before: Mapping[str, str], after: Mapping[str, str]) -> Sources:
    """Returns the sources of the patch from ``before`` to ``after``."""
    changed = {path: text for path, text in after.items() if before.get(path) != text}
    return Sources(
        {path: text for path, text in changed.items() if path not in before},
        {path: seam(path, before[path], text) for path, text in changed.items() if path in before},
    )


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes ``files`` under ``root``; returns it."""
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())
    return root


def write_sources(root: Path, made: Sources, base: Base = V070) -> Folders:
    """Writes ``made`` as a package and its overrides below ``root``; returns where they are."""
    folders = Folders(root / "gradloc", root / "overrides")
    for path, text in made.new_files.items():
        write_file(folders.place(base.tag, path), text.encode())
    for path, text in made.seams.items():
        write_file(folders.overrides / base.tag / f"{path}.patch", text.encode())
    return folders


def release(patches: Path, patch: bytes, version: str) -> None:
    """Has the folder ``patches`` keep ``patch`` as a release of the past."""
    write_file(patches / f"released/{version}.patch", remembered(patch, version, V070.tag))


def patch_of(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """Returns the patch from ``before`` to ``after``."""
    return sources(before, after).patch(V070)


def make_patches(
    folder: Path,
    after: Mapping[str, str] = RESULT,
    before: Mapping[str, str] = BASE,
    older: Mapping[str, str] | None = None,
    verl: Base = V070,
) -> Path:
    """Builds a patches/ folder below ``folder`` as make_patch.sh does; it knows ``older`` as 0.0.9."""
    tree = write_tree(folder / "pristine", before)
    folders = write_sources(folder, sources(before, after))
    if older is not None:
        release(folder / "patches", patch_of(before, older), "0.0.9")
    for name, data in compose(folders, {verl: tree}).items():
        write_file(folder / "patches" / name, data)
    return folder / "patches"


def files_of(root: Path) -> dict[str, str]:
    """Returns the text of every file under ``root`` but those of git and of the applier."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".git", ".gradloc-patch"} & set(path.relative_to(root).parts)
    }


def picture(root: Path) -> dict[str, tuple]:
    """Returns everything about a tree that must not change: kinds, modes, times, contents."""
    seen = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder) / name
            info = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            times = () if path.is_dir() else (info.st_mtime_ns,)
            seen[str(path.relative_to(root))] = (info.st_mode, *times, content)
    return seen


@contextlib.contextmanager
def unchanged(*roots: Path) -> Iterator[None]:
    """What happens here is to change nothing in ``roots``."""
    before = [*map(picture, roots)]
    yield
    assert [*map(picture, roots)] == before


def make_clone(root: Path, files: Mapping[str, str] = BASE) -> Path:
    """Writes ``files`` as a git repository with one commit; returns its root."""
    write_tree(root, files)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "base")
    return root


def git(root: Path, *arguments: str, **variables: str) -> str:
    """Runs git with a neutral identity; returns its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | variables
    done = subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@dataclass(frozen=True)
class Outcome:
    """What a command line returned and printed."""

    code: int
    out: str
    err: str

    def expect(self, code: int, *said: str) -> "Outcome":
        """This, whose exit code is to be ``code``; all of ``said`` is to stand in the answer, or in the refusal."""
        assert self.code == code, self.out + self.err
        for text in said:
            assert text in (self.err if code else self.out)
        return self

    @property
    def document(self) -> dict:
        return json.loads(self.out)

    @property
    def reason(self) -> str | None:
        return self.document.get("error", {}).get("reason")


def run(capsys, patches: Path, *arguments: str) -> Outcome:
    """Runs apply_patch.py's command line in this process."""
    capsys.readouterr()
    code = cli.main(["--patches", str(patches), *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return Outcome(code, *captured)


def make(capsys, folders: Folders, patches: Path, *options: object) -> Outcome:
    """Runs make_patch.sh's command line in this process."""
    capsys.readouterr()
    places = ("--package", folders.package, "--overrides", folders.overrides, "--patches", patches)
    code = regenerate.main([*map(str, places), *map(str, options)])
    return Outcome(code, *capsys.readouterr())
