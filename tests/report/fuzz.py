# SPDX-License-Identifier: Apache-2.0
"""Damages what a reader is given: an answer, or one sentence, never a traceback, an escape or a hang.

docs/security.md says what long runs found: it stays in test_fuzz.py, as bytes or in ``WORDS``.
"""

import contextlib
import copy
import gzip
import io
import itertools
import json
import re
import struct
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gradloc import command
from gradloc.config import settings_from
from gradloc.explain.text import printable
from gradloc.record.store import load_states
from gradloc.replay.bundle import ReplayError, read_bundle
from patchkit.apply import load
from patchkit.refusal import Refusal
from tests.report import hostile
from tests.report.logs.table import LOGS, ROOT

SECONDS = 10.0
WORDS = [
    *rb"""nan inf -1e400 1e308 { } [[[[ ] , " ' \u0000 null""".split(),
    *(b"9" * 400, b"9" * 5000),
    *(b"\x00", b"\xff\xfe", b"\x1b]0;x\x07", b"\x1b[2J", b"\xe2\x80\xae", b"\xc2\x9b", b"\xed\xa0\x80", b"\n", b"\r"),
    *(b"step:99999999999999999999 - ", b'{"step": 1e999, "data": {}}', b"step:-3 - actor/grad_norm:2", b"(pid=1) "),
    *(b'{"step": true}', b"===", b"|", b";", b"\t", b"_step", b"grad_norm", b"=cmd|", b"</script>", b"../../"),
    *(struct.pack("<Q", number) for number in (0, 1, 2**31, 2**63, 2**64 - 1)),
]


@cache
def samples(reader: str) -> list[tuple[str, bytes]]:
    """Whole files that a reader knows, by name."""
    files = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.stat().st_size < 40_000)
    demo = next((ROOT / "examples" / "demo" / "gradloc" / "events").iterdir())
    kinds: dict[str, Callable[[Path], bool]] = {
        "text logs": lambda path: path.suffix in (".log", ".out", ".txt", ".jsonl"),
        "documents": lambda path: path.suffix in (".json", ".ipynb"),
        "tables": lambda path: path.suffix in (".csv", ".tsv", ".md"),
        "streams": lambda path: path.suffix in (".wandb", ".swanlab", ".0") or "tfevents" in path.name,
        "databases": lambda path: path.suffix in (".db", ".sqlite"),
    }
    if reader in kinds:
        return [(path.name, path.read_bytes()) for path in files if kinds[reader](path)]
    rows = [{"step": step, "grad_norm": 1.0 + step % 3, "loss": 0.5, "note": "a"} for step in range(40)]
    log = "\n".join(map(json.dumps, rows)).encode()
    if reader == "columns":
        import pandas

        table, made = pandas.DataFrame(rows), []
        for name, write in (("a.parquet", table.to_parquet), ("a.xlsx", table.to_excel)):
            write(sink := io.BytesIO(), index=False)
            made.append((name, sink.getvalue()))
        return made
    if reader == "archives":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("runs/a.jsonl", log)
        tar = hostile.tar_of([("a.jsonl", tarfile.REGTYPE, log)])
        return [("a.zip", packed.getvalue()), ("a.jsonl.gz", gzip.compress(log)), ("a.tar", tar)]
    if reader == "mismatch":
        import numpy

        numpy.savez(sink := io.BytesIO(), rollout_log_probs=numpy.ones((2, 9)), old_log_probs=numpy.ones((2, 9)))
        text = "row,rollout_log_probs,old_log_probs\n" + "0,-0.5,-0.5\n" * 20
        line = json.dumps({"rollout_log_probs": [-0.5] * 20, "old_log_probs": [-0.4] * 20}).encode()
        bundle = ("batch.safetensors", (demo / "batch.safetensors").read_bytes())
        return [("a.npz", sink.getvalue()), ("a.csv", text.encode()), ("a.jsonl", line), bundle]
    if reader == "bundles":
        return [(path.name, path.read_bytes()) for path in sorted(demo.iterdir()) if path.name != "sequences.json"]
    if reader == "events":
        lines = (demo.parent.parent / "events.jsonl").read_bytes()
        return [("events.jsonl", lines), *((path.name, path.read_bytes()) for path in sorted(demo.glob("*.json")))]
    if reader == "manifests":
        return [(name, (ROOT / "patches" / name).read_bytes()) for name in ("manifest.json", "gradloc.patch")]
    config = {"search": {"strategy": "auto"}, "action": {"mode": "mask"}, "evidence": {"max_gb": 1.0}, "dump_dir": "a"}
    state = {"schema_version": 1, "trigger": {"norms": [1.0, 2.0]}, "health": {"step": 3}}
    script = "python -m verl.trainer.main_ppo +gradloc=on \\\n  trainer.nnodes=2 data.train_batch_size=64\n"
    texts = {"settings.json": json.dumps(config), "gradloc.json": json.dumps(state), "run.sh": script}
    return [(name, text.encode()) for name, text in texts.items()]


@st.composite
def damaged(draw: Any, reader: str) -> tuple[str, bytes]:
    """A sample with up to six places changed, its JSON's values among them."""
    known = samples(reader)
    name, given_bytes = draw(st.sampled_from(known))
    content = bytearray(given_bytes)
    for _ in range(draw(st.integers(1, 6))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(1, 200))
        kind = draw(st.integers(0, 8))
        if kind == 0:
            content[at : at + length] = b""
        elif kind in (1, 2):
            content[at:at] = draw(st.sampled_from(WORDS)) * draw(st.sampled_from((1, 1, 3, 300)))
        elif kind == 3:
            content[at:at] = content[at : at + length]
        elif kind == 4:
            content[at : at + 8] = draw(st.binary(min_size=1, max_size=8))
        elif kind == 5:
            content[at:] = b"" if draw(st.booleans()) else draw(st.sampled_from(known))[1][at:]
        elif kind == 6 and (grafted := _grafted(draw, bytes(content))):
            content[:] = grafted
        elif number := _numbers(bytes(content)):
            begin, end = draw(st.sampled_from(number))
            value = draw(st.one_of(st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=3)))
            content[begin:end] = json.dumps(value).encode()
    return name, bytes(content)


def _grafted(draw: Any, content: bytes) -> bytes | None:
    """JSON, or one line of it, with a part put in place of another one; None where there is none."""
    lines = [content] if content.count(b"\n") > 200 or content[:2] in (b"{\n", b"[\n") else content.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return None
    places, left = [], [value]
    while left and len(places) < 2000:
        part = left.pop()
        inner = [*part.items()] if isinstance(part, dict) else [*enumerate(part)] if isinstance(part, list) else []
        places += [(part, key) for key, _ in inner]
        left += [each for _, each in inner]
    if not places:
        return None
    (part, key), (other, name) = draw(st.sampled_from(places)), draw(st.sampled_from(places))
    given = draw(st.sampled_from([other[name], [other[name]], {"step": other[name]}, 5, "abc", [], {}, [5], None]))
    part[key] = copy.deepcopy(given)
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines)


def _numbers(content: bytes) -> list[tuple[int, int]]:
    value = rb'(?<=[:\[, ])(?:-?\d[\d.e+-]*|"[^"\n]{0,40}"|true|null)'
    return [found.span() for found in itertools.islice(re.finditer(value, content), 2000)]


def _shown(folder: Path, name: str, content: bytes) -> list[list[str]]:
    path = folder / name
    path.write_bytes(content)
    return [
        ["report", str(path)],
        ["health", str(path)],
        ["watch", "--once", str(path)],
        ["report", str(path), "--json"],
    ]


def _of_events(folder: Path, name: str, content: bytes) -> list[list[str]]:
    demo = next((ROOT / "examples" / "demo" / "gradloc" / "events").iterdir())
    place = folder / "events" / demo.name
    place.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes((demo.parent.parent / "events.jsonl").read_bytes())
    for each in demo.glob("*.json"):
        (place / each.name).write_bytes(each.read_bytes())
    (folder / name if name == "events.jsonl" else place / name).write_bytes(content)
    if name == "meta.json":
        (folder / "events.jsonl").write_bytes(b"")
    run = str(folder)
    return [
        ["report", run],
        ["report", run, "-o", f"{run}/page.html"],
        ["report", run, "--format", "csv"],
        ["cure", run],
    ]


def answer(reader: str, name: str, content: bytes, choice: int = 0) -> str:
    """What a reader says of a file; an AssertionError where that is no answer and no sentence."""
    with tempfile.TemporaryDirectory(prefix="gradloc-fuzz-") as made:
        folder, started = Path(made), time.process_time()
        said = _call(reader, folder, name, content, choice)
        assert time.process_time() - started < SECONDS, f"{time.process_time() - started:.0f} s"
        page = folder / "page.html"
        for text in [said, page.read_text(encoding="utf-8") if page.exists() else ""]:
            assert printable(text) == text, "a character that commands a terminal"
        return said


def _call(reader: str, folder: Path, name: str, content: bytes, choice: int) -> str:
    path = folder / name
    if reader in ("bundles", "manifests"):
        for other, whole in samples(reader):
            (folder / other).write_bytes(whole)
        path.write_bytes(content)
        try:
            if reader == "bundles":
                return f"{len(read_bundle(str(folder)).layout)} micro-batches"
            return f"{len(load(folder))} patches"
        except (ReplayError, Refusal) as error:
            return printable(str(error))
    if name in ("settings.json", "gradloc.json"):
        path.write_bytes(content)
        if name == "gradloc.json":
            load_states({"trigger": _State()}, str(folder))
            return "a state"
        try:
            return str(bool(settings_from(json.loads(content))))
        except (ValueError, RecursionError) as error:  # json's are Hydra's business
            return printable(str(error))
    if reader == "mismatch":
        path.write_bytes(content)
        commands = [["mismatch", str(path)], ["mismatch", str(path), "--json"]]
    elif name == "run.sh":
        path.write_bytes(content)
        commands = [["check", str(path)]]
    else:
        commands = (_of_events if reader == "events" else _shown)(folder, name, content)
    with _captured() as (out, err), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = command.main(commands[choice % len(commands)])
    assert not [each for each in warned if issubclass(each.category, RuntimeWarning | SyntaxWarning)], warned
    said, wrong = out.getvalue(), err.getvalue()
    assert code in (0, 1, 2), code
    assert code != 2 or said or wrong.startswith("gradloc: ") and wrong.count("\n") == 1, (code, wrong)
    return said + wrong


class _State:
    def load_state(self, state: dict) -> None:
        self.norms = [float(norm) for norm in state["norms"]]


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    class Sink(io.StringIO):
        def reconfigure(self, **_: Any) -> None: ...

    with contextlib.redirect_stdout(Sink()) as out, contextlib.redirect_stderr(Sink()) as err:
        yield out, err


READERS = (
    *("text logs", "documents", "tables", "streams", "databases", "columns", "archives"),
    *("events", "bundles", "mismatch", "settings", "manifests"),
)
