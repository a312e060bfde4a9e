# SPDX-License-Identifier: Apache-2.0
"""A small verl to patch, sources that patch it, and the command lines in this process."""

import contextlib
import json
import os
import re
import subprocess
from dataclasses import dataclass

from patchkit import build
from patchkit.tree import SEAM

ACTOR, TRAINER, OTHER = "verl/workers/actor/dp_actor.py", "verl/trainer/ray_trainer.py", "verl/utils/other.py"


def numbered(label, count=40):
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
FOREIGN = {ACTOR: BASE[ACTOR].replace("line 20\n", "line of theirs\n"), "verl/theirs.py": "theirs = 1\n"}
"""What a patch from elsewhere makes."""


def foreign_patch(ids=10):
    """Return that patch with its blob ids shortened or removed."""
    text = "".join(build.file_diff(p, BASE[p].encode() if p in BASE else None, t.encode()) for p, t in FOREIGN.items())

    def cut(found):
        return f"index {found[1][:ids]}..{found[2][:ids]}{found[3]}" if ids else ""

    return re.sub(r"index (\w+)\.\.(\w+)(.*\n)", cut, text).encode()


def put(root, files):
    """Writes ``files`` under ``root``; returns it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def files_of(root):
    """The text of every file under ``root`` but those of git and of the applier."""
    files = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    own = {".git", ".gradloc-patch"}
    return {str(name): path.read_bytes().decode() for name, path in files.items() if not own & set(name.parts)}


def make_repo(root):
    """A repository of ours for the small verl: its sources, built. Its base is kept where a fetched one would be."""
    put(root / "base" / "verl-0.7.0", BASE)
    put(root, {"gradloc/__init__.py": '__version__ = "1.0"\n'})
    sources = {"base.json": json.dumps({"commit": "0" * 40, "sdist_sha256": "0" * 64}), SEAM: RESULT[SEAM]}
    sources |= {f"{p}.patch": build.file_diff(p, BASE[p].encode(), RESULT[p].encode(), 1) for p in (ACTOR, TRAINER)}
    put(root / "verl_overrides" / "v0.7.0", sources)
    assert build.main(["--root", str(root)]) == 0
    return root


def make_clone(root, files=BASE):
    """``files`` as a git repository with one commit."""
    shell(put(root, files), "git init -q -b main; git add -A; git commit -qm base")
    return root


def shell(folder, command):
    """What a command of a shell prints, which knows the small verl's files and has a neutral git."""
    names = {"A": ACTOR, "T": TRAINER, "S": SEAM, "V": "verl/version/version", "GIT_CONFIG_GLOBAL": os.devnull}
    names |= {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(["sh", "-ec", command], cwd=folder, env=kept | names, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def unchanged(root):
    """What happens here is to change nothing in ``root``: no kind, mode, time or content."""

    def picture():
        infos = {path: path.lstat() for path in sorted(root.rglob("*"))}
        times = {path: 0 if path.is_dir() else info.st_mtime_ns for path, info in infos.items()}
        return [(p, i.st_mode, times[p], p.read_bytes() if p.is_file() else b"") for p, i in infos.items()]

    before = picture()
    yield
    assert picture() == before


@dataclass(frozen=True)
class Outcome:
    """What a command line returned and printed."""

    code: int
    out: str
    err: str

    def expect(self, code, *said):
        """This, whose exit code is to be ``code``; all of ``said`` is to be in the answer, or in the refusal."""
        assert self.code == code and "Traceback" not in self.out + self.err, self.out + self.err
        for text in said:
            assert text in (self.err if code else self.out), self.out + self.err
        return self

    @property
    def document(self):
        return json.loads(self.out)


def run(capsys, main, *arguments):
    """A command line."""
    capsys.readouterr()
    code = main([*map(str, arguments)])
    return Outcome(code, *capsys.readouterr())
