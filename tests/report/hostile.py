# SPDX-License-Identifier: Apache-2.0
"""Small files that ask for much time or memory, or for a place outside of their folder."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import resource
import signal
import sqlite3
import struct
import sys
import tarfile
import tempfile
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from gradloc.record import Culprit, Event, Trigger
from gradloc.record.store import plain
from tests.report.builder import REPO

MB = 1 << 20
ROWS = [json.dumps({"step": step, "grad_norm": 1.0 + step % 3}) for step in range(1, 40)]
GOOD = "\n".join(ROWS) + "\n"
NORMS = "".join(f"step:{step} - actor/grad_norm:1.{step % 7}\n" for step in range(1, 40))


_FLOATS = "".join(f" - timing_s/part_{at}:np.float64(0.12345678901234567)" for at in range(60))
_MANY_KEYS = {f"a{at}": 1 for at in range(20_000)}


def _among(line: str) -> str:
    return GOOD + line + "\n" + GOOD.replace('"step": ', '"step": 10')


TEXTS: dict[str, Callable[[], str | bytes]] = {
    "deep.jsonl": lambda: _among('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "deep.json": lambda: '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep900.json": lambda: '{"log_history":' + "[" * 900 + "]" * 900 + "}",
    "deep900.jsonl": lambda: _among('{"step": 3, "a":' + '{"b":' * 900 + "1" + "}" * 901),
    "deep-walk.json": lambda: '{"result":' + "[" * 800 + '["1","x"]' + "]" * 800 + "}",
    "wrapped.jsonl": lambda: _among('{"log":' * 800 + '"x"' + "}" * 800),
    "opened.log": lambda: GOOD + "{'step': 21, 'grad_norm': " + "(" * 90_000,
    "minus.log": lambda: "{'loss': 1, 'grad_norm': " + "-" * 60_000 + "1, 'step': 2}\n",
    "sum.json": lambda: "[" + "1+" * 400_000 + "1]",
    "literal.json": lambda: "[" + "None," * 3_000_000 + "None]",
    "config.log": lambda: "{'actor': {" + "\n'a': [[[[1]]]]," * 400_000 + NORMS,
    "digits.jsonl": lambda: _among('{"step":' + "9" * 5_000_000 + ',"grad_norm":1}'),
    "digits.log": lambda: "step:1 - grad_norm:" + "1" * 20_000_000 + "\n" + NORMS,
    "exponents.jsonl": lambda: _among('{"step": 1e308, "grad_norm": 1e999}\n{"step": -1e999, "grad_norm": [1]}'),
    "lists.json": lambda: "[" + "[]," * 8_000_000 + "[]]",
    "objects.json": lambda: "[" + "{}," * 8_000_000 + "{}]",
    "values.json": lambda: '{"data":[' + "0," * 20_000_000 + "0]}",
    "keys.json": lambda: "{" + ",".join(f'"{at:x}":1' for at in range(2_000_000)) + "}",
    "surrogates.json": lambda: '{"a": "' + "\\ud800" * 3_000_000 + '"}',
    "wide-letters.json": lambda: '{"a": "\U0001f600' + "a" * 44_000_000 + '"}',
    "spaces.json": lambda: '{"log_history": [' + " " * 60_000_000 + "]}",
    "one-line.log": lambda: "a" * 40_000_000,
    "zeros.log": lambda: b"\0" * 30_000_000,
    "utf16.log": lambda: b"\xff\xfe" + b"\xd8\x00" * 3_000_000,
    "carriage.log": lambda: "\r" * 5_000_000 + NORMS,
    "wide.csv": lambda: ",".join(["step", *(f"a{at}" for at in range(20_000))]) + "\n" + "1,2\n" * 400_000,
    "wide-then-short.csv": lambda: (
        (",".join(["step", "grad_norm", *(f"a{at}" for at in range(3_000))]) + "\n")
        + ("1," * 3_001 + "1\n") * 210
        + "1,2\n" * 300_000
    )[: 10 * MB],
    "quote.csv": lambda: 'step,grad_norm\n1,"' + "x" * 20_000_000,
    "commas.csv": lambda: "step,grad_norm\n" + "," * 8_000_000 + "\n",
    "cells.md": lambda: "| step | grad_norm |\n| --- | --- |\n" + "|" * 4_000_000 + "\n",
    "same-step.log": lambda: "step:1 - actor/grad_norm:1\n" * 150_000,
    "backwards.log": lambda: "".join(f"step:{20_000 - at} - actor/grad_norm:1\n" for at in range(20_000)),
    "to-and-fro.log": lambda: "".join(f"step:{at % 2} - actor/grad_norm:{at}\n" for at in range(20_000)),
    "floats.log": lambda: "".join(f"step:{at} - actor/grad_norm:np.float64(1.5){_FLOATS}\n" for at in range(3_000)),
    "not-a-number.log": lambda: "".join(f"step:{at} - actor/grad_norm:nan\n" for at in range(40_000)),
    "processes.log": lambda: "".join(f"(W pid={at}) step:{at} - actor/grad_norm:1\n" for at in range(10_000)),
    "names-of-few.jsonl": lambda: "".join(
        json.dumps({"step": at, "grad_norm": 1.0, **{f"k{at}_{key}": key for key in range(1_000)}}) + "\n"
        for at in range(150)
    ),
    "digit-keys.json": lambda: json.dumps({"9" * 5_000: {"grad_norm": 1.0}, "1": {"grad_norm": 2.0}}),
    "nested-in-2-mb.jsonl": lambda: GOOD + json.dumps({"step": 50, "grad_norm": 1.0, "k" * 2_000_000: _MANY_KEYS}),
    "nested-in-2-mb.log": lambda: NORMS + str({"step": 50, "grad_norm": 1.0, "k" * 2_000_000: _MANY_KEYS}) + "\n",
    "series-in-2-mb.json": lambda: json.dumps({"k" * 2_000_000: dict.fromkeys(_MANY_KEYS, {"x": [1], "y": [1]})}),
    "long-names.csv": lambda: f"step,{','.join(at * 100_000 for at in 'abcdefghij')}\n" + "1,2,3,4,5,6,7,8,9,1,2\n" * 2,
    "long-head.csv": lambda: f"{','.join(at * 100_000 for at in 'abcdefghij')}\n" + "1,2,3,4,5,6,7,8,9,1\n" * 2,
    "tags.ipynb": lambda: json.dumps({"cells": [{"outputs": [{"data": {"text/html": "<tr" + "<td" * 3_000_000}}]}]}),
    "folder-of-5000.log": lambda: f"trainer.default_local_dir={'x' * 5_000}\n{{'output_dir': '{'x' * 5_000}'}}\n"
    + NORMS,
    "names.jsonl": lambda: "".join(f'{{"step": {at}, "grad_norm": 1, "m{at}": 1}}\n' for at in range(1_500)),
    "skips.log": lambda: NORMS + "OVERFLOW! Skipping step. loss scale: 2, reducing to 1\n" * 200_000,
    "bars.log": lambda: "".join(f"{at}/9 [00:01<00:02, 1it/s, loss=0.3]\r" for at in range(100_000)) + NORMS,
    "braces.log": lambda: NORMS + "grad_norm={" * 200_000 + "}" * 200_000 + "\n",
    "escapes.log": lambda: NORMS.replace("actor/", "\x1b]0;x\x07\x1b[2J\u202e\x9b") * 2,
    "cells.ipynb": lambda: json.dumps({"cells": [{"outputs": [{"text": ["x\n"] * 3}] * 3}] * 100_000}),
    **{
        f"again-{name}.log": lambda unit=unit: NORMS + unit * (400_000 // len(unit)) + "\n"
        for name, unit in {
            "step": "step:1 - ",
            "pair": "a.b/c-d:1.0 ",
            "dict": "{'a': ",
            "norm": "grad_norm ",
            "colour": "\x1b[1m",
            "blank": " " * 10 + "|",
            "ray": "[36m(x pid=1)",
            "comma": "grad_norm=1,",
            "exponent": "1e",
            "epoch": "[1][1/",
        }.items()
    },
}


def _packed(part: bytes, count: int, opener: Callable = gzip.open) -> bytes:
    with opener(made := io.BytesIO(), "wb") as file:
        for _ in range(count):
            file.write(part)
    return made.getvalue()


def zip_of(entries: dict[str, bytes], repeat: int = 1, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of these files, by name; ``repeat``: each content that often."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in entries.items():
            with archive.open(name, "w", force_zip64=True) as file:
                for _ in range(repeat):
                    file.write(content)
    return made.getvalue()


def tar_of(entries: list[tuple[str, bytes, bytes]], **also: dict) -> bytes:
    """A tar of entries: name, kind, and content or target."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT, **also) as archive:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size = kind, len(content) if kind == tarfile.REGTYPE else 0
            entry.linkname = content.decode() if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _sparse() -> bytes:
    """A tar of one file with a hole of 3 GB."""
    entry = tarfile.TarInfo("run.log")
    entry.type, entry.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[386:410], header[483:495] = b"%011o\0%011o\0" % (0, 512), b"%011o\0" % 3_000_000_000
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + NORMS.encode()[:512].ljust(512) + bytes(1024)


def _zstd(content: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        return content[:1000]
    return zstandard.compress(content)


def _window() -> bytes:
    """An .xz whose header asks for a window of 4 GB."""
    packed = bytearray(lzma.compress(NORMS.encode(), preset=0))
    end = 12 + 4 * (packed[12] + 1)
    packed[packed.index(b"\x21\x01", 12, end) + 2] = 40
    packed[end - 4 : end] = struct.pack("<I", zlib.crc32(packed[12 : end - 4]))
    return bytes(packed)


_FILE, _RUN = tarfile.REGTYPE, ("run.jsonl", tarfile.REGTYPE, GOOD.encode())
PACKED: dict[str, Callable[[], bytes]] = {
    "zeros.wandb.gz": lambda: _packed(b":W&B\0\0\0" + b"\0" * MB, 1500),
    "line.log.gz": lambda: _packed(b"a" * MB, 400),
    "rows.log.gz": lambda: _packed(b"step:1 - actor/grad_norm:1\n" * 40_000, 300),
    "spaces.json.gz": lambda: _packed(b'{"log_history":[' + b" " * MB, 400),
    "zeros.log.xz": lambda: _packed(b"\0" * MB, 300, lzma.open),
    "window.log.xz": _window,
    "lzma.zip": lambda: zip_of({"run.jsonl": GOOD.encode()}, method=zipfile.ZIP_LZMA),
    "zeros.log.bz2": lambda: _packed(b"\0" * MB, 300, bz2.open),
    "twice.log.gz": lambda: gzip.compress(_packed(b"\0" * MB, 300)),
    "cut.log.gz": lambda: _packed(NORMS.encode(), 3)[:-30],
    "zeros.zip": lambda: zip_of({"run.jsonl": b"\0" * MB}, 2_000),
    "many.zip": lambda: zip_of({f"d{at}/f.jsonl": b"" for at in range(30_000)}),
    "slip.zip": lambda: zip_of({"../../../../../tmp/PWN": b"x", "/tmp/PWN": b"x", "run.jsonl": GOOD.encode()}),
    "long.zip": lambda: zip_of({"n" * 300 + ".jsonl": GOOD.encode()}),
    "deep.zip": lambda: zip_of({"a/" * 3_000 + "run.jsonl": GOOD.encode()}),
    "inside.zip": lambda: zip_of({"a.zip": zip_of({"b.zip": zip_of({"run.jsonl": b"\0" * MB}, 50)})}),
    "escape.zip": lambda: zip_of({"a\x1b]0;x\x07\x1b[2J.csv": b"x,y\n1,2\n"}),
    "locked.zip": lambda: re.sub(
        rb"(PK\x01\x02.{4})..(.{2})", lambda found: found[1] + b"\1\0" + found[2], zip_of({"r.jsonl": b"x"}), flags=re.S
    ),
    "sizes.zip": lambda: zip_of({"run.jsonl": GOOD.encode()}).replace(
        struct.pack("<I", len(GOOD)), b"\xff\xff\xff\x7f"
    ),
    "zeros.tar.gz": lambda: gzip.compress(tar_of([("a", _FILE, b"\0" * (400 * MB))])),
    "many.tar": lambda: tar_of([(f"f{at}.jsonl", _FILE, b"") for at in range(12_000)]),
    "slip.tar": lambda: tar_of([("../../../../tmp/PWN", _FILE, b"x"), _RUN]),
    "links.tar": lambda: tar_of(
        [("d", tarfile.SYMTYPE, b"/tmp"), ("l.jsonl", tarfile.SYMTYPE, b"/etc/passwd"), ("d/PWN", _FILE, b"x"), _RUN]
        + [
            ("h.jsonl", tarfile.LNKTYPE, b"/etc/passwd"),
            ("p.log", tarfile.FIFOTYPE, b""),
            ("c.log", tarfile.CHRTYPE, b""),
        ]
    ),
    "header.tar.gz": lambda: gzip.compress(tar_of([_RUN], pax_headers={"comment": "x" * (200 * MB)})),
    "long-name.tar.xz": lambda: lzma.compress(tar_of([("n" * (100 * MB), _FILE, b"x"), _RUN]), preset=1),
    "sparse.tar": _sparse,
    "empty-parts.log.gz": lambda: gzip.compress(b"") * 50_000 + gzip.compress(NORMS.encode()),
    "rows.log.zst": lambda: _zstd(b"step:1 - grad_norm:1\n" * 20_000_000),
    "deep.tar": lambda: tar_of([*((("a/" * depth + "f"), _FILE, b"x") for depth in (400, 1_200, 1_900)), _RUN]),
    "header.tar": lambda: tar_of([_RUN], pax_headers={"comment": "x" * (20 * MB)}),
    "name.log.gz": lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (60 * MB),
    "comment.log.gz": lambda: gzip.compress(NORMS.encode()) + b"\x1f\x8b\x08\x10" + bytes(6) + b"a" * (60 * MB),
    "escape.tar": lambda: tar_of([("run\x1b]0;x\x07\u202e.jsonl", _FILE, GOOD.encode())]),
}


def _blocks(part: bytes, size: int) -> bytes:
    """A .wandb of parts of records, kind 3 being neither a record's first part nor its last."""
    made = bytearray(b":W&B\0\0\0")
    while len(made) < size:
        left = 32768 - len(made) % 32768
        made += b"\0" * left if left < 7 + len(part) else b"\0\0\0\0" + struct.pack("<HB", len(part), 3) + part
    return bytes(made)


def _database(*statements: str, rows: list[tuple] | None = None) -> bytes:
    database = sqlite3.connect(":memory:")
    for statement in statements:
        database.execute(statement)
    for row in rows or ():
        database.execute(f"insert into metrics values ({','.join('?' * len(row))})", row)
    database.commit()
    return database.serialize()


_ENDLESS = "with recursive c(x) as (select 1 union all select x+1 from c) select"
_TRACKIO = "create table metrics(id, run_id, run_name, step, metrics)"
_HEAVY = "create table metrics(id, run_id, run_name, step, blob, metrics as (hex(zeroblob(100000000))))"
_VIEW = f"create view metrics as {_ENDLESS} x id, 'r' run_id, 'r' run_name, x step, '' metrics from c"
_RUNS = "with recursive c(x) as (select 1 union all select x+1 from c where x < 50000) select 'r', x from c"
_STEPS = [(at, "r", "r", at, '{"grad_norm": 1}') for at in range(9)]
_UNSEEN = "create table metrics(id, run_id, run_name, step, blob, metrics as/**/(hex(zeroblob(100000000))))"
_LONG_KEY = json.dumps({"k" * MB: {f"a{at}": 1 for at in range(50_000)}})
_SORTED = f"create view runs as {_ENDLESS} x as run_uuid, x as name from c order by x desc"
STORES: dict[str, Callable[[], bytes]] = {
    "parts.wandb": lambda: _blocks(b"", 4_000_000),
    "record.wandb": lambda: _blocks(b"\x08\x00" * 16_000, 30 * MB),
    "length.tfevents.1": lambda: struct.pack("<Q", 2**63 - 1) + b"\0" * 4 + b"\x09" + b"\0" * 100,
    "gigabyte.tfevents.1": lambda: struct.pack("<Q", 2**30) + b"\0" * 4 + b"\x09" + b"\0" * 100,
    "view.db": lambda: _database(_VIEW),
    "view-of-runs.db": lambda: _database("create table metrics(run_uuid,timestamp,step,key,value,is_nan)", _SORTED),
    "computed.db": lambda: _database(_HEAVY),
    "computed-unseen.db": lambda: _database(_UNSEEN),
    "view-behind-others.db": lambda: _database(*(f"create table t{at}(a)" for at in range(1_001)), _VIEW),
    "nested-in-1-mb.db": lambda: _database(
        _TRACKIO, "create table configs(run_id, config)", f"insert into configs values('r','{_LONG_KEY}')", rows=_STEPS
    ),
    "bytes.db": lambda: _database(
        _TRACKIO, rows=[(at, b"\xff", "r\x1b[2J", at, b'{"grad_norm": 1}') for at in range(40)]
    ),
    "large.db": lambda: _database(_TRACKIO, rows=[(1, "r", "r", 1, '{"a": "' + "x" * (30 * MB) + '"}')]),
    "deep.db": lambda: _database(_TRACKIO, rows=[(1, "r", "r", 1, "[" * 100_000 + "]" * 100_000)]),
    "settings.db": lambda: _database(
        _TRACKIO, "create table configs(run_id, config)", "insert into configs values('r','{')", rows=_STEPS
    ),
    "runs.db": lambda: _database(
        "create table runs(run_uuid, name)",
        "create table params(run_uuid, key, value)",
        "create table metrics(run_uuid, timestamp, step, key, value, is_nan)",
        f"insert into runs {_RUNS}",
        rows=[("r", at, at, "grad_norm", 1.0, 0) for at in range(2_000)],
    ),
}


def _parquet(name: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = io.BytesIO()
    count = 2_000_000 if name == "rows.parquet" else 200_000 if name == "texts.parquet" else 100
    step, norm = pa.array(range(count) if name == "texts.parquet" else [1] * count, pa.int64()), [1.0] * count
    columns = {"step": step, "grad_norm": pa.array(norm)}
    if name == "texts.parquet":
        texts = pa.array(["x" * (8 * MB)]).dictionary_encode().dictionary
        columns["text"] = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), texts)
    if name == "columns.parquet":
        columns |= {f"a{at}": pa.array([1.0] * count) for at in range(5_000)}
    if name == "fixed.parquet":
        columns["text"] = pa.array([b"x" * (4 * MB)] * count, pa.binary(4 * MB))
    if name == "lists.parquet":
        text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * (8 * MB)]))
        columns["text"] = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), text)
    table = pa.table(columns)
    with pq.ParquetWriter(made, table.schema, compression="zstd") as writer:
        for _ in range(30 if name == "rows.parquet" else 1):
            writer.write_table(table)
    content = made.getvalue()
    if name == "cut.parquet":
        return content[: len(content) // 2]
    return content if name != "footer.parquet" else b"PAR1" + b"\0" * 100 + struct.pack("<I", 0xFFFFFFF0) + b"PAR1"


def _workbook(change: Callable[[bytes], bytes]) -> bytes:
    import openpyxl

    book, made, plainly = openpyxl.Workbook(), io.BytesIO(), io.BytesIO()
    for row in [("step", "grad_norm"), *((step, 1.0) for step in range(20))]:
        book.active.append(row)
    book.save(plainly)
    with zipfile.ZipFile(plainly) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if "sheet1" in name else content)
    return made.getvalue()


_END = b"</sheetData>"
_LOL = b'<!DOCTYPE l [<!ENTITY a "lollollollollol">' + b"".join(
    f'<!ENTITY {chr(98 + at)} "{("&" + chr(97 + at) + ";") * 10}">'.encode() for at in range(9)
)
_CELL = b'<sheetData><row r="1"><c r="A1" t="inlineStr"><is><t>&j;</t></is></c></row>'
_FAR = b"".join(b'<row r="%d"><c r="XFD%d"><v>1</v></c></row>' % (row, row) for row in range(30, 20_000))


def _before_end(rows: bytes) -> Callable[[bytes], bytes]:
    return lambda sheet: sheet.replace(_END, rows + _END)


_PASSWD = b'<!DOCTYPE l [<!ENTITY j SYSTEM "file:///etc/passwd">]>'
COLUMNS: dict[str, Callable[[], bytes]] = {
    **{name: lambda name=name: _parquet(name) for name in ("rows.parquet", "texts.parquet", "columns.parquet")},
    **{name: lambda name=name: _parquet(name) for name in ("cut.parquet", "footer.parquet", "fixed.parquet")},
    "lists.parquet": lambda: _parquet("lists.parquet"),
    "far.xlsx": lambda: _workbook(_before_end(_FAR)),
    "last.xlsx": lambda: _workbook(_before_end(b'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>')),
    "row.xlsx": lambda: _workbook(_before_end(b'<row r="99999999999"><c r="A1"><v>1</v></c></row>')),
    "lol.xlsx": lambda: _workbook(lambda s: _LOL + b"]>" + s.split(b"?>", 1)[-1].replace(b"<sheetData>", _CELL)),
    "file.xlsx": lambda: _workbook(lambda s: _PASSWD + s.split(b"?>", 1)[-1].replace(b"<sheetData>", _CELL)),
    "text.xlsx": lambda: _workbook(_before_end(b"<row><c><v>" + b"1" * 300_000_000 + b"</v></c></row>")),
    "nested.xlsx": lambda: _workbook(_before_end(b"<a>" * 2_000_000 + b"</a>" * 2_000_000)),
    "attributes.xlsx": lambda: _workbook(
        _before_end(b"<a " + b" ".join(b'a%d="1"' % at for at in range(600_000)) + b"/>")
    ),
    "cut.xlsx": lambda: _workbook(lambda sheet: sheet[: len(sheet) // 2]),
}


def _events(folder: Path, *lines: str) -> None:
    folder.mkdir()
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


def _line(**changes: object) -> str:
    return json.dumps(plain(Event(event_id="a", trigger=Trigger(grad_norm=9.0), **changes)))


def _demo_events(folder: Path) -> None:
    line = (REPO / "examples" / "demo" / "gradloc" / "events.jsonl").read_text(encoding="utf-8").strip()
    _events(folder, *(line.replace("step000024", f"step{step:06d}") for step in range(3_000)))


def _linked(folder: Path) -> None:
    _events(folder, _line(folder="events/a"))
    (folder / "events").mkdir()
    (folder / "events" / "a").symlink_to("/etc")
    (folder / "train.log").symlink_to("/etc/passwd")
    (folder / "around").symlink_to(folder)


def _pipes(folder: Path) -> None:
    _events(folder, _line(folder="events/a"))
    (folder / "events" / "a").mkdir(parents=True)
    for name in ("meta.json", "sequences.json"):
        os.mkfifo(folder / "events" / "a" / name)
    os.mkfifo(folder / "train.log")


def _equal(folder: Path) -> None:
    folder.mkdir()
    for name, count, last in (("a.jsonl", 8_000, 2.0), ("b.jsonl", 16_000, 1.0)):
        rows = ({"step": at, "grad_norm": last if at == count - 1 else 1.0} for at in range(count))
        (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")


def _large_sequences(folder: Path) -> None:
    _events(folder, _line(folder="events/a"))
    (folder / "events" / "a").mkdir(parents=True)
    (folder / "events" / "a" / "sequences.json").write_text('{"sequences": [' + " " * 60_000_000 + "]}")


_NESTED = '{"step": {"global_step": 1}, "culprits": ' + "[" * 90_000 + "]" * 90_000 + "}"
_MANY = tuple(Culprit(rank=0, micro_batch=0, micro_batch_row=0, positions=(at,), share=1e-5) for at in range(30_000))


def _linked_parts(folder: Path) -> None:
    """A run of MLflow's whose parameters are a link, and a folder of events that is one."""
    (folder / "m" / "metrics").mkdir(parents=True)
    (folder / "m" / "meta.yaml").write_text("a: 1")
    (folder / "m" / "metrics" / "grad_norm").write_text("".join(f"17000000000{at} 1.5 {at}\n" for at in range(10, 50)))
    (folder / "m" / "params").symlink_to("/etc")
    (folder / "gradloc").symlink_to("/")


def _large_metric(folder: Path) -> None:
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "grad_norm").write_text("17")
    os.truncate(folder / "metrics" / "grad_norm", 3_000_000_000)


RUNS: dict[str, Callable[[Path], None]] = {
    "linked-parts": _linked_parts,
    "large-metric": _large_metric,
    "linked": _linked,
    "pipes": _pipes,
    "equal": _equal,
    "sequences": _large_sequences,
    "nested": lambda folder: _events(folder, _line(), _NESTED, _line()),
    "one-name": lambda folder: _events(folder, *[_line()] * 3_000),
    "long-line": lambda folder: _events(folder, _line(), '{"step": "' + "x" * 60_000_000, _line()),
    "culprits": lambda folder: _events(folder, _line(culprits=_MANY)),
    "events": _demo_events,
    "words": lambda folder: _events(folder, _line().replace('"a"', '"\\u001b]0;x\\u0007\\u202e\\ud800"', 1)),
    "numbers": lambda folder: _events(folder, _line().replace("9.0", "9" * 400), _line().replace("9.0", '"NaN"')),
    "outside": lambda folder: _events(folder, _line(folder="../../../etc"), _line(folder="a\0b"), _line(folder="/etc")),
}
FILES = {**TEXTS, **PACKED, **STORES, **COLUMNS}


def make(name: str, folder: Path) -> Path:
    """Write one of them; returns its path."""
    path = folder / name
    if name in RUNS:
        RUNS[name](path)
    else:
        content = FILES[name]()
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def in_a_child(function: Callable[[], int], *files: Path) -> tuple[int, resource.struct_rusage]:
    """Call a function in a forked process that prints into files; returns its exit code and what it used."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(300)
            for number, path in enumerate(files, 1):
                os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
            code = function()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used


def serve() -> None:
    """For each name that is read: make that file, have it reported on, and print as JSON what that said and cost.

    What reports needs is imported once. Each file is made and read in a process of its own, forked from this one.
    """
    from gradloc.command import main

    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as printed:
            made, out, err = Path(folder), Path(printed, "out"), Path(printed, "err")
            (unpacked := Path(printed, "unpacked")).mkdir()
            name = line.rstrip("\n")
            code, _ = in_a_child(lambda: make(name, made) and 0)  # noqa: B023 (called at once)
            assert code == 0
            tempfile.tempdir = str(unpacked)
            code, used = in_a_child(lambda: main([str(made / name)]), out, err)  # noqa: B023
            tempfile.tempdir = None
            answer = {
                "code": code,
                "seconds": used.ru_utime + used.ru_stime,
                "peak_kb": used.ru_maxrss,
                "said": out.read_text(),
                "wrong": err.read_text(),
                "left": os.listdir(made) + os.listdir(unpacked),
            }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
