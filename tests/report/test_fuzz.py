# SPDX-License-Identifier: Apache-2.0
"""Every reader gives an answer or one sentence, whatever the bytes; what longer runs of the fuzzer found stays here."""

import io
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fuzz import READERS, answer, damaged, samples

FILES = int(os.environ.get("FUZZ_FILES", 12))
"""Damaged for each reader: the same ones each time, or more, and others each time."""


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_answered_or_refused_in_a_sentence(reader):
    @settings(max_examples=FILES, derandomize=FILES == 12)
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


def _no_rows() -> bytes:
    import numpy

    numpy.savez(sink := io.BytesIO(), rollout=numpy.ones((2_000_000_000, 0)), trainer=numpy.ones((2_000_000_000, 0)))
    return sink.getvalue()


def _prompts() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 1_000
    prompt = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 8_000_000]))
    norms = pa.array([-0.001 * at for at in range(count)])
    table = pa.table({"rollout_log_probs": norms, "old_log_probs": norms, "prompt": prompt})
    pq.write_table(table, sink := io.BytesIO(), compression="zstd")
    return sink.getvalue()


_CELLS = [
    {"outputs": 5},
    {"outputs": {"a": 1}},
    {"outputs": [5, {"data": 5}, {"data": {"text/html": [5]}}, {"text": 7}]},
]
_NEWER = {"columns": {"share": [0.5], "later_version": [1.0]}}
FOUND = {
    "a literal whose keys are numbers": ("documents", "a.json", b"{1.5: [1, 2], 'x': [1]}"),
    "a number that Python warns of": ("documents", "a.json", b"{'grad_norm': 65or 2}"),
    "a head that is longer than a field may be": ("tables", "a.csv", b'step,"' + b"x" * 140_000 + b'"\n1,2\n'),
    "a name of two lines": ("streams", "a.jsonl", b'{"step": 1, "lo\\nss": 2}\n' * 40),
    "a packed part that is damaged": ("archives", "a.zip", None),
    "log-probs that are not finite": ("mismatch", "a.safetensors", None),
    "a length without end": ("mismatch", "a.jsonl", b'{"rollout": [-1], "trainer": [-1], "input_lengths": [1e999]}'),
    "a tensor that is a number": ("mismatch", "b.safetensors", (7).to_bytes(8, "little") + b'{"a":5}'),
    "rows of nothing": ("mismatch", "a.npz", None),
    "a long prompt that each row has": ("mismatch", "a.parquet", None),
    "a notebook of other types": ("documents", "a.ipynb", json.dumps({"cells": [*_CELLS, 5]}).encode()),
    "points among others": ("documents", "a.json", b"[[0.5, 1, 2.0], 5, [0.5, 2, 2.0]]"),
    "a path that a pattern read again and again": ("settings", "run.sh", b"+gradloc=on trainer" + b"../" * 300),
    "a number of many digits": ("text logs", "a.log", b"{'grad_norm': 1, a=" + b"9" * 3000 + b".5.5x}\n"),
    "a number far from what follows": ("tables", "a.csv", b"step,grad_norm\n1,9" + b" " * 2500 + b"q\n"),
    "a line across a page": ("text logs", "a.log", b"step 1 loss 0.5 grad_norm 1 " + b"=" * 100_000 + b"\n"),
    "words far apart": ("text logs", "a.log", b"step 1 loss 0.5 grad_norm 1" + b" " * 100_000 + b"q\n"),
    "a column that is not known": ("events", "sequences.json", json.dumps({"sequences": [_NEWER]}).encode()),
    "an escape in a script": ("settings", "run.sh", b"python -m verl.trainer.main_ppo trainer.nnodes='\x1b[2J'\n"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name):
    reader, file, content = FOUND[name]
    makers = {"a.zip": _broken_zip, "a.safetensors": _signalling, "a.npz": _no_rows, "a.parquet": _prompts}
    made = makers.get(file, lambda: content)()
    for choice in range(4):
        assert answer(reader, file, made, choice)
