# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a file holds: an answer, or one sentence; never a traceback. A failure names its seed."""

import random

import pytest

from gradloc.report.cli import main
from tests.report.logs.table import LOGS

FILES = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.stat().st_size < 40_000)
SEEDS, BATCH = 2000, 100
BATCHES = [pytest.param(at, marks=[pytest.mark.slow] if at else []) for at in range(SEEDS // BATCH)]
"""The first with every change, the others take minutes."""
WORDS = b"nan inf -1e400 { } \x00 \xff\xfe [[[[ 1e308, ; \x1b[36m _step ===".split()
WORDS += b'step:99999999999999999999 - |{"step": 1e999, "data": {}}|\r|step:-3 - actor/grad_norm:2|(pid=1) |\n'.split(
    b"|"
)
COMMANDS = (["FILE"], ["health", "FILE"], ["trigger", "FILE"], ["compare", "FILE", "FILE"], ["watch", "FILE", "--once"])


def mutated(seed: int) -> tuple[str, bytes]:
    """A file's name and what it holds, damaged in up to six places."""
    rng = random.Random(seed)
    path = rng.choice(FILES)
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 6)):
        at, length = rng.randrange(len(content) + 1), rng.randint(1, 200)
        kind = rng.randrange(7)
        if kind == 0 and content:
            content[at % len(content)] = rng.randrange(256)
        elif kind == 1:
            del content[at : at + length]
        elif kind == 2:
            content[at:at] = rng.choice(WORDS) * rng.choice((1, 1, 3))
        elif kind == 3:
            content[at:at] = content[at : at + length]
        elif kind == 4:
            content[at:at] = rng.randbytes(length)
        elif kind == 5:
            del content[at:]
        else:
            other = rng.choice(FILES).read_bytes()
            content += other[rng.randrange(len(other) + 1) :]
    return path.name, bytes(content)


@pytest.mark.full
@pytest.mark.parametrize("batch", BATCHES)
def test_a_damaged_file_is_answered_or_refused_in_a_sentence(batch, tmp_path, capsys):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        name, content = mutated(seed)
        path = tmp_path / name
        path.write_bytes(content)
        words = [str(path) if word == "FILE" else word for word in COMMANDS[seed % len(COMMANDS)]]
        try:
            code = main(words)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {words}") from error
        out, said = capsys.readouterr()
        is_refused = said.startswith("gradloc-report: ") and said.count("\n") == 1
        assert code == 0 or code == 2 and (is_refused or out), seed  # too short to judge is shown, and ends with 2
        path.unlink()
