# SPDX-License-Identifier: Apache-2.0
"""A small verl to patch, sources that patch it, and the command lines in this process."""

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit import build
from patchkit.tree import SEAM

ACTOR, TRAINER, OTHER = "verl/workers/actor/dp_actor.py", "verl/trainer/ray_trainer.py", "verl/utils/other.py"


def numbered(label: str, count: int = 40) -> str:
    """A text of distinct lines."""
    return "".join(f"{label} line {number}\n" for number in range(1, count + 1))


BASE = {
    "verl/__init__.py": "version = 1\n",
    "verl/version/version": "0.7.0\n",
    ACTOR: numbered("actor"),
    TRAINER: numbered("trainer", 60),
    OTHER: "untouched = True\n",
}
RESULT = BASE | {
    ACTOR: BASE[ACTOR].replace("actor line 10\n", "actor line 10\nhook()\n"),
    TRAINER: BASE[TRAINER].replace("trainer line 7\n", "").replace("line 50\n", "line fifty\n"),
    SEAM: 'VERSION = "1.0"\n',
}
TOUCHED = (ACTOR, TRAINER, SEAM)


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes ``files`` under ``root``; returns it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())
    return root


def files_of(root: Path) -> dict[str, str]:
    """The text of every file under ``root`` but those of git and of the applier."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".git", ".gradloc-patch"} & set(path.relative_to(root).parts)
    }


def make_repo(root: Path) -> Path:
    """A repository of ours for the small verl: its sources, built. Its base is kept where a fetched one would be."""
    write_tree(root / "base" / "verl-0.7.0", BASE)
    folder = root / "verl_overrides" / "v0.7.0"
    write_tree(root, {"gradloc/__init__.py": '__version__ = "1.0"\n'})
    write_tree(folder, {"base.json": json.dumps({"commit": "0" * 40, "sdist_sha256": "0" * 64})})
    for path, text in RESULT.items():
        if path not in BASE:
            write_tree(folder, {path: text})
        elif BASE[path] != text:
            write_tree(folder, {f"{path}.patch": build.seam(path, BASE[path].encode(), text.encode())})
    assert build.main(["--root", str(root)]) == 0
    return root


def make_clone(root: Path, files: Mapping[str, str] = BASE) -> Path:
    """``files`` as a git repository with one commit."""
    write_tree(root, files)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "base")
    return root


def git(root: Path, *arguments: str) -> None:
    """git with a neutral identity."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments]
    subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True)


def picture(root: Path) -> dict[str, tuple]:
    """Everything about a tree that must not change: kinds, modes, times, contents."""
    seen = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        seen[str(path.relative_to(root))] = (info.st_mode, 0 if path.is_dir() else info.st_mtime_ns, content)
    return seen


@contextlib.contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """What happens here is to change nothing in ``root``."""
    before = picture(root)
    yield
    assert picture(root) == before


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
            assert text in (self.err if code else self.out), self.out + self.err
        assert "Traceback" not in self.out + self.err
        return self

    @property
    def document(self) -> dict:
        return json.loads(self.out)


def run(capsys, main: Callable[[list[str]], int], *arguments: object) -> Outcome:
    """A command line."""
    capsys.readouterr()
    code = main([*map(str, arguments)])
    return Outcome(code, *capsys.readouterr())
