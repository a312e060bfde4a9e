# SPDX-License-Identifier: Apache-2.0
"""Read the two columns from what trainers write: prime-rl's token exports, NeMo-RL's training data, our own bundles,
and tables (CSV, JSON lines, npz, parquet where pyarrow is there)."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from sys import intern
from typing import Any, TypeVar
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from ..record.files import DOCUMENT, LINE, MB, UNPACKED, columns_of_parquet, is_bomb, parse_json, read_bytes
from .columns import Columns, MismatchError, SeveralRunsError, TooFewTokensError, columns

Made = TypeVar("Made")
NAMES = {
    "rollout": ("rollout_log_probs", "rollout_log_prob", "rollout_logprobs", "inference_logprobs",
                "generation_logprobs", "rollout_logps", "sampling_per_token_logps", "sampling_logprobs",
                "vllm_logprobs", "rollout"),
    "trainer": ("old_log_probs", "old_log_prob", "trainer_logprobs", "prev_logprobs", "old_per_token_logps",
                "old_logprobs", "trainer_log_probs", "trainer"),
    "mask": ("response_mask", "loss_mask", "token_loss_mask", "completion_mask", "mask"),
    "ids": ("token_ids", "responses", "completion_ids", "input_ids", "token_id", "ids"),
    "row": ("row", "sequence_id", "sequence", "sample", "export_sequence_idx"),
    "group": ("uid", "group", "prompt_id", "prompt"),
    "prompt": ("prompt_length", "prompt_lengths"),
    "length": ("input_lengths", "input_length"),
    "counts": ("sample_loss_mask",),
}  # fmt: skip
"""The names of each column in trainers' files and ours; the first one present is read."""
_NUMBERS = {name for ours, theirs in NAMES.items() if ours not in ("row", "group") for name in theirs}
_SHOWN = 12  # names of a file's columns in a message
TEXT_ONLY = {
    "verl's rollout dump": {"input", "output", "score"},
    "TRL's completions": {"prompt", "completion", "advantage"},
}
"""Further files that trainers write, by the fields that they are known by."""


def read(path: Path, short: list[str] | None = None) -> dict[str, Columns]:
    """Return the two columns of each step that a file or folder holds, by the step's name, in order.

    ``short`` gets a sentence for each step that has too few tokens, where another has enough.

    Raises:
        MismatchError: if there is nothing to read, or a column is missing.
    """
    found: dict[str, list[Path]] = {}
    for file in _files(path):
        found.setdefault(_step(file), []).append(file)
    if not found:
        raise MismatchError(
            f"{path} holds no columns of log-probs: name prime-rl's token_exports, NeMo-RL's train_data_step*.jsonl, "
            "an event's bundle, or a .csv, .jsonl, .npz or .parquet with rollout_log_probs and old_log_probs."
        )
    for step, files in found.items():
        if len({file.parent for file in files}) > 1:
            raise SeveralRunsError(f"{path} holds {step} of several runs: name one, such as {files[0].parent}.")
    made: dict[str, Columns] = {}
    left_out: list[TooFewTokensError] = []
    for step, files in sorted(found.items(), key=lambda each: _number(each[0])):
        try:
            made[step] = _columns(files)
        except TooFewTokensError as error:
            left_out.append(error)
            if short is not None:
                short.append(f"{step}: {error}")
    if not made:
        raise left_out[0]
    return made


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise MismatchError(f"{path} does not exist.")
    if path.is_file():
        return [path]
    for pattern in ("**/token_exports/step_*/rank_*.jsonl", "rank_*.jsonl", "step_*/rank_*.jsonl",
                    "**/train_data_step*.jsonl", "**/batch.safetensors", "*"):  # fmt: skip
        files = sorted(each for each in path.glob(pattern) if each.suffix in READERS and each.is_file())
        if files:
            return files
    return []


def _step(file: Path) -> str:
    if file.name.startswith("rank_"):
        return file.parent.name
    if file.name == "batch.safetensors":  # of an event, whose bundle had a folder of its own before
        return (file.parent.parent if file.parent.name == "bundle" else file.parent).name
    return file.stem


def _number(name: str) -> tuple[int, str]:
    digits = re.findall(r"\d+", name)
    return (int(digits[-1]) if digits else 0, name)


def _columns(files: list[Path]) -> Columns:
    tables = [_whole(file, _table, file) for file in files]
    names = set.intersection(*map(set, tables))
    return _whole(files[0], _made, {name: [row for table in tables for row in table[name]] for name in names})


def _table(file: Path) -> dict[str, list[NDArray]]:
    """Return a file's columns by our names, an array for each row."""
    if not file.stat().st_size:
        raise MismatchError(f"{file} is empty: name a file with both log-probs of each token.")
    if file.suffix not in READERS:
        raise MismatchError(
            f"{file} is neither a log that can be read nor one of {', '.join(READERS)}: name a file with both "
            "log-probs of each token."
        )
    found = READERS[file.suffix](file)
    named = {ours: next((name for name in theirs if name in found), None) for ours, theirs in NAMES.items()}
    table = {ours: found[name] for ours, name in named.items() if name is not None}
    for what, known in TEXT_ONLY.items():
        if "rollout" not in table and known <= found.keys():
            raise MismatchError(
                f"{file} is {what}: text and scores, no log-probs. Write the batch's rollout_log_probs, old_log_probs "
                "and response_mask to an .npz, or set mismatch.every to have each step judged while it trains."
            )
    for needed, who in (("rollout", "rollout engine"), ("trainer", "trainer")):
        if needed not in table:
            seen = ", ".join(sorted(found)[:_SHOWN]) or "none"
            raise MismatchError(
                f"{file} has no column of the {who}'s log-probs (found: {seen}): name it "
                f"{' or '.join(NAMES[needed][:3])}."
            )
    return _rows(table)


def _whole(file: Path, reader: Callable[[Any], Made], given: Any) -> Made:
    """Return what a reader makes of a file's content, or a sentence that says why it makes nothing."""
    try:
        with np.errstate(all="ignore"):
            return reader(given)
    except MismatchError:
        raise
    except Exception as error:  # each format's library has kinds of its own
        raise MismatchError(f"{file} cannot be read ({error}): it may be cut short, or another kind of file.") from None


def _rows(table: dict[str, Any]) -> dict[str, list[NDArray]]:
    """Return the columns by our names, an array for each row; a flat column is cut where the row's name changes."""
    sizes = [(len(column), getattr(column, "nbytes", len(column))) for column in table.values()]
    if not len(table["rollout"]) or any(num_rows > num_bytes for num_rows, num_bytes in sizes):
        raise ValueError("it has no row, or rows of nothing")
    kinds = {name: None if name in ("group", "row") else float for name in table}
    if np.ndim(table["rollout"][0]) > 0:
        return {name: [np.ravel(np.asarray(row, kinds[name])) for row in rows] for name, rows in table.items()}
    names = np.asarray(table.pop("row", np.zeros(len(table["rollout"]))))
    cuts = np.flatnonzero(names[1:] != names[:-1]) + 1
    return {name: np.split(np.asarray(values, kinds[name]), cuts) for name, values in table.items()}


def _made(table: dict[str, list[NDArray]]) -> Columns:
    """Return a file's rows, with or without their prompts, as columns of the tokens that the mask leaves."""
    rollout, ids = table["rollout"], table.get("ids")
    masks = [mask > 0 for mask in table.get("mask") or map(np.ones_like, rollout)]
    for row, mask in enumerate(masks):
        if "length" in table:
            mask[int(table["length"][row][0]) :] = False
        if "counts" in table and not table["counts"][row].any():
            mask[:] = False
    if ids is not None and any(len(a) != len(b) for a, b in zip(ids, rollout, strict=True)):
        ids = None  # of the whole sequence, with log-probs of the response
    begins = [int(mask.argmax()) if len(mask) else 0 for mask in masks]
    first = {name: [row[0] for row in table[name]] for name in ("prompt", "group") if name in table}
    if any(begins):
        first.setdefault("prompt", begins)
        if ids is not None:
            first.setdefault("group", [row[:begin].tobytes() for row, begin in zip(ids, begins, strict=True)])
    is_masked = {"mask", "length", "counts"} & table.keys()
    return columns(rollout, table["trainer"], masks if is_masked else None, ids=ids, **first)


def _json_lines(file: Path) -> Mapping[str, Any]:
    """Read JSON lines, one row each."""
    with file.open(encoding="utf-8") as lines:
        rows = [parse_json(line) for line in iter(lambda: lines.readline(DOCUMENT + 1), "") if line.strip()]
    if not rows:
        raise ValueError("it has no row")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _csv(file: Path) -> Mapping[str, Any]:
    """Read the columns that are known, number by number: a table's text would take thirty times the memory."""
    csv.field_size_limit(LINE)  # a field may hold a whole text
    with file.open(newline="", encoding="utf-8-sig") as lines:
        head_line = lines.readline()
        rows = csv.reader(chain([head_line], lines), delimiter=max(",;\t", key=head_line.count))
        head = [name.strip() for name in next(rows, [])]
        texts = {name: list[str]() for name in head if name in (*NAMES["row"], *NAMES["group"])}
        numbers = {name: array("d") for name in head if name in _NUMBERS}
        places = {name: at for at, name in enumerate(head)}
        for row in rows:
            if len(row) != len(head):
                raise ValueError(f"line {rows.line_num} has {len(row)} fields, the head {len(head)}")
            for name, text in texts.items():
                text.append(intern(row[places[name]] or "nan"))
            for name, values in numbers.items():
                values.append(float(row[places[name]] or "nan"))
    return dict.fromkeys(head) | texts | numbers


def _npz(file: Path) -> Mapping[str, Any]:
    with ZipFile(file) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
        if is_bomb(size, file.stat().st_size):
            raise ValueError(f"it becomes {size / MB:,.0f} MB, as no log-probs do")
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _parquet(file: Path) -> Mapping[str, Any]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise MismatchError(f"{file} needs pyarrow: pip install pyarrow, or write a .csv or .npz.") from None
    types = columns_of_parquet(pq.read_metadata(file), file.stat().st_size)
    names = [name for theirs in NAMES.values() for name in theirs if name in types]
    texts = [name for name in names if types[name].endswith(("string", "binary"))]
    found = pq.read_table(file, columns=names, read_dictionary=texts)
    numbers = {name: found[name].to_numpy() for name in names if name not in texts}
    codes = {name: found[name].unify_dictionaries().combine_chunks().indices.to_numpy(False) for name in texts}
    return dict.fromkeys(types) | numbers | codes


def _safetensors(file: Path) -> Mapping[str, Any]:
    """Return a bundle's tensors: eight bytes for the header's length, the header in JSON, the numbers."""
    data, types = read_bytes(file, most=UNPACKED), {"F32": "<f4", "F64": "<f8", "I64": "<i8", "F16": "<f2", "BOOL": "?"}
    begins = 8 + int.from_bytes(data[:8], "little")
    if begins > len(data) or data[8:9] != b"{":
        raise MismatchError(f"{file} is no safetensors file.")
    numbers = memoryview(data)[begins:]
    return {
        name: np.frombuffer(numbers[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in parse_json(data[8:begins]).items()
        if entry.get("dtype") in types
    }


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".npz": _npz,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
