# SPDX-License-Identifier: Apache-2.0
"""Writes docs/applier-transcript.md: the applier at work on verl's released trees; each line is what was printed.

    python scripts/applier_transcript.py > docs/applier-transcript.md

A test holds the page to what this prints. Left out is what differs from machine to machine or with each edit of the
package: folders, times, numbers of files, ids.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from patchkit.build.base import DEFAULT_CACHE, ensure_base  # noqa: E402

HEAD = """\
# A transcript of the applier

Made by `python scripts/applier_transcript.py`, which runs every command below; a test holds this page to what they
print. `verl` is a git repository with the files of verl 0.7.0, `verl-0.7.0` and `verl-0.7.1` are unpacked archives,
`site-packages` is an environment's. `...` stands for times, numbers of files and ids, which change with the package.
"""
APPLY, MAKE = "python apply_patch.py", "bash make_patch.sh"
ACTOR = "verl/workers/actor/dp_actor.py"
SECTIONS = {
    "A clone": [
        f"{APPLY} --repo ../verl --check",
        f"{APPLY} --repo ../verl",
        f"{APPLY} --repo ../verl",
        "git -C ../verl status --short | head -2",
        f"{APPLY} --repo ../verl --reverse",
        "git -C ../verl status --short",
    ],
    "Edit in the checkout, take the edits into the sources": [
        f"{APPLY} --repo ../verl-0.7.0 --quiet",
        "echo '# An edit of ours.' >> ../verl-0.7.0/verl/gradloc/loop/localizer.py",
        f"sed -i 's/^        self.gradloc = .*/&  # an edit of a seam/' ../verl-0.7.0/{ACTOR}",
        f"{APPLY} --repo ../verl-0.7.0 --status",
        f"{MAKE} --repo ../verl-0.7.0",
        f"{APPLY} --repo ../verl-0.7.0 --status --quiet",
        f"{APPLY} --repo ../verl-0.7.0 --reverse --quiet",
        "diff -r .gradloc/base/verl-0.7.0 ../verl-0.7.0 && echo the same",
    ],
    "What it refuses": [
        f"{APPLY} --repo ../verl/verl",
        f"echo '# mine' >> ../verl-0.7.0/{ACTOR}",
        f"{APPLY} --repo ../verl-0.7.0",
        f"{APPLY} --repo ../verl --quiet && git -C ../verl checkout -q -- {ACTOR}",
        f"{APPLY} --repo ../verl",
        f"{APPLY} --repo ../verl --reverse --force",
        "sed 's/hook/hack/' patches/gradloc.patch > other.patch",
        f"{APPLY} --repo ../verl --patch-file other.patch",
        f"{APPLY} --repo ../verl --sha256 {'0' * 64}",
    ],
    "verl 0.7.1, an unpacked archive": [
        f"{APPLY} --repo ../verl-0.7.1",
        f"cp ../verl/{ACTOR} ../verl-0.7.1/{ACTOR}",
        f"{APPLY} --repo ../verl-0.7.1",
    ],
    "An installed package": [
        f"{APPLY} --repo ../site-packages",
        f"{APPLY} --installed",
        f"{APPLY} --installed --reverse",
    ],
}


def transcript(work: Path) -> str:
    """Returns the page; runs its commands in the empty folder ``work``."""
    repository, (first, second) = work / "gradloc", (ensure_base("v0.7.0"), ensure_base("v0.7.1"))
    for name in ("gradloc", "verl_overrides", "patches", "patchkit"):
        shutil.copytree(ROOT / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("apply_patch.py", "make_patch.sh"):
        shutil.copy(ROOT / name, repository)
    (repository / ".gradloc").mkdir()
    (repository / ".gradloc/base").symlink_to(DEFAULT_CACHE)
    shutil.copytree(first, work / "verl")
    commit = "git init -q && git add -A && git -c user.name=A -c user.email=a@example.org commit -qm 'verl 0.7.0'"
    subprocess.run(["bash", "-c", commit], cwd=work / "verl", check=True)
    shutil.copytree(first, work / "verl-0.7.0")
    shutil.copytree(second, work / "verl-0.7.1")
    shutil.copytree(first / "verl", work / "site-packages/verl")
    # Without the packages of the Python that runs this: what can be imported changes what is said.
    python = work / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin", "PYTHON": "python", "LC_ALL": "C.UTF-8"}
    environment |= {"PYTHONPATH": str(work / "site-packages"), "GIT_CONFIG_GLOBAL": "/dev/null"}
    page = [HEAD]
    for title, commands in SECTIONS.items():
        page.append(f"\n## {title}\n\n```console\n")
        for command in commands:
            done = subprocess.run(["bash", "-c", f"{{ {command}\n}} 2>&1"], cwd=repository, env=environment, stdout=-1)
            page.append(f"$ {command}\n{neutral(done.stdout.decode(), work)}")
            page.append(f"(exit code {done.returncode})\n" if done.returncode else "")
        page.append("```\n")
    return "".join(page)


def neutral(said: str, work: Path) -> str:
    """Returns what was printed without what differs from machine to machine, or with each edit."""
    said = said.replace(str(work.resolve()), "~")
    for prefix in (sys.prefix, sys.base_prefix):
        said = said.replace(prefix, "~/environment")
    said = re.sub(r"\b\d+ of \d+\b", "... of ...", re.sub(r"line \d+", "line ...", said))
    said = re.sub(r"\b\d+ (files?\b|modified|added|removed|of the)", r"... \1", said)
    said = re.sub(r"(git blob |HEAD is |sha256 )[0-9a-f]{12}\b|\b[0-9a-f]{64}\b", r"\1...", said)
    said = re.sub(r"\(\d+\.\d\d s\)", "(... s)", said)
    return re.sub(r"[ \t]+$", "", said, flags=re.MULTILINE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(transcript(Path(folder)), end="")
