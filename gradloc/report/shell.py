# SPDX-License-Identifier: Apache-2.0
"""Find the overrides of verl's config in a shell script."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w/-]*(?:[.@][\w/.@-]+)?=.*", re.DOTALL)
_BLOCKS = ("gradloc", "trainer", "actor_rollout_ref", "data", "algorithm", "critic", "reward_model")
"""The first part of an override's name."""


def is_script(path: Path, text: str) -> bool:
    """Return whether a file is a shell script and not a config.

    >>> is_script(Path("run.sh"), ""), is_script(Path("a.yaml"), "trainer: 1")
    (True, False)
    """
    return path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!")


def overrides_in(text: str) -> list[str]:
    """Return the overrides that a script passes to verl, with the script's own variables replaced by their values.

    >>> overrides_in("N=4\\npython -m verl \\\\\\n trainer.nnodes=$N \\\\\\n  +gradloc=on 'data.path=$X' $@")
    ['trainer.nnodes=4', '+gradloc=on', 'data.path=$X']
    """
    known: dict[str, str] = {}
    found: dict[str, str] = {}
    for words in _commands(text):
        if len(words) == 1 and (assigned := _ASSIGNED.match(words[0])) and "." not in assigned[1]:
            known[assigned[1]] = _substituted(assigned[2], known)
            continue
        for word in words:
            key = word.partition("=")[0].lstrip("+~")
            if _OVERRIDE.fullmatch(word) and key.split(".")[0] in _BLOCKS and ("." in key or word.startswith("+")):
                found[key] = _substituted(word, known)
    return list(found.values())


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"^\s*(?:export|local|readonly)\s+", "", line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        if words:
            yield words


def _substituted(text: str, known: dict[str, str]) -> str:
    """Return the text with ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` replaced where a value is known."""

    def value(found: re.Match) -> str:
        name, otherwise = found[1] or found[3], found[2]
        return known.get(name, otherwise if otherwise is not None else found[0])

    return _VARIABLE.sub(value, text, count=20)[:10_000]  # a variable may double the one before it
