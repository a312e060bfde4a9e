# SPDX-License-Identifier: Apache-2.0
"""Every reader gives an answer or one sentence, whatever the bytes; what longer runs of the fuzzer found stays here."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fuzz import READERS, answer, damaged, samples


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_answered_or_refused_in_a_sentence(reader):
    @settings(max_examples=12)
    @given(damaged(reader), st.integers(0, 3))
    def attempt(made, choice):
        answer(reader, *made, choice)

    attempt()


def _broken_zip() -> bytes:
    content = bytearray(samples("archives")[0][1])
    at = content.index(b"runs/a.jsonl") + len("runs/a.jsonl")
    content[at : at + 40] = bytes(255 - byte for byte in content[at : at + 40])
    return bytes(content)


def _signalling() -> bytes:
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]} for name in ("rollout", "trainer", "group")}
    ).encode()
    return len(header).to_bytes(8, "little") + header + b"\0\0\xa0\x7f" * 4  # a signalling NaN


FOUND = {
    "a literal whose keys are numbers": ("documents", "a.json", b"{1.5: [1, 2], 'x': [1]}"),
    "a number that Python warns of": ("documents", "a.json", b"{'grad_norm': 65or 2}"),
    "a head that is longer than a field may be": ("tables", "a.csv", b'step,"' + b"x" * 140_000 + b'"\n1,2\n'),
    "a name of two lines": ("streams", "a.jsonl", b'{"step": 1, "lo\\nss": 2}\n' * 40),
    "a packed part that is damaged": ("archives", "a.zip", None),
    "log-probs that are not finite": ("mismatch", "a.safetensors", None),
    "a path that a pattern read again and again": ("settings", "run.sh", b"+gradloc=on trainer" + b"../" * 300),
    "an escape in a script": ("settings", "run.sh", b"python -m verl.trainer.main_ppo trainer.nnodes='\x1b[2J'\n"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name):
    reader, file, content = FOUND[name]
    made = {"a.zip": _broken_zip, "a.safetensors": _signalling}.get(file, lambda: content)()
    for choice in range(4):
        assert answer(reader, file, made, choice)
