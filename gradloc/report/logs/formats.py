# SPDX-License-Identifier: Apache-2.0
"""Recognizes a file's format by its content: a table of formats, read by the first that fits."""

import errno
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from sys import stdin

from ...explain.text import first_of, plural
from ...record.files import is_inside
from ..commands import COMMANDS
from ..errors import ReportError, did_you_mean
from ..memory import uncollected
from . import stores, tables
from .documents import is_document, read_document
from .lines import read_by_pattern, read_lines
from .names import is_norm, is_training_loss, may_lack_digits, number
from .pairs import NUMBER
from .recording import Recording
from .segments import LoggedRun, runs_of
from .source import Source, is_spreadsheet, spool, unpack

FORMATS: tuple[tuple[Callable[[Source], bool], Callable[[Source], list[Recording]]], ...] = (
    (lambda source: source.head.startswith(b":W&B"), stores.read_wandb),
    (lambda source: source.head.startswith(b":SWL"), stores.read_swanlab),
    (lambda source: source.head.startswith(b"SQLite format 3\0"), stores.read_database),
    (lambda source: source.head.startswith(b"PAR1"), tables.read_parquet),
    (lambda source: is_spreadsheet(source.path), tables.read_spreadsheet),
    (stores.is_tensorboard, stores.read_tensorboard),
    (is_document, read_document),
    (tables.is_boxed, tables.read_boxes),
    (tables.is_table, tables.read_table),
    (lambda source: source.coding is not None, read_lines),
)
"""Pairs of a test on a file's first bytes or name, and a reader, which returns nothing for another format."""
KNOWN = (
    "a console log (verl, TRL, OpenRLHF, slime, NeMo-RL, AReaL, prime-rl, Megatron), verl's file logger, TensorBoard, "
    "W&B, MLflow, SwanLab, trackio, trainer_state.json, a printed table, or a CSV, parquet or .xlsx"
)
DEPTH = 6
"""How many folders down logs are looked for."""
MOST = 400
"""Files of a folder that are looked into."""
_SKIPPED = re.compile(
    r"checkpoints?|events|__pycache__|node_modules|\.git|\.venv|site-packages|global_step_\d+|gradient_analysis"
)
"""Folders that hold no logs."""
_ENDINGS = re.compile(
    r"\.(?:log|txt|out|err|jsonl?|ndjson|ipynb|csv|tsv|parquet|xlsx|md|db|sqlite3?|wandb|swanlab)(?:\.\d+)?(?:\.(?:gz|xz|bz2|zst))?$|\.tfevents\.|^[^.]+$",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"^events\.jsonl$|^requirements.*\.txt$|^task\.json$|(?:config|args|tokenizer|vocab|tokens|metadata|index|summary)[^/]*\.json$"
)
"""Files that are often found among logs and are not logs."""
_LAST_NUMBER = re.compile(rf"{NUMBER}\s*$", re.IGNORECASE)
_BY_SAMPLES = re.compile(r"\bTrain[/_]Samples[/_]")
"""The beginning of the names that DeepSpeed's monitor gives to files and metrics."""
LOGLIKE = re.compile(r"\.(?:log|out|jsonl|csv|tsv|wandb|swanlab)(?:\.\w+)?$|\.tfevents\.")


@uncollected()
def read(
    paths: Sequence[Path], metric: str | None = None, pattern: str | None = None
) -> tuple[list[LoggedRun], list[str]]:
    """Return the runs in files, folders, or standard input (``-``), and notes on what could not be read.

    Args:
        paths: at least one.
        metric: the one that holds the gradient norms; None: the one that looks like it.
        pattern: a regular expression that finds the norm in a line, by its group ``value``, and maybe ``step``.

    Raises:
        ReportError: when there is no run.
    """
    for path in paths:
        check(path)
    if pattern is not None:
        chains: dict[tuple, list[Recording]] = {(path,): [read_by_pattern(path, pattern)] for path in paths}
        return runs_of(chains.values(), metric), []
    with ExitStack() as unpacked:
        return _read([(path, unpack(path, unpacked)) for path in paths], metric)


def _read(paths: Sequence[tuple[Path, Path]], metric: str | None) -> tuple[list[LoggedRun], list[str]]:
    """Return the runs in files or folders, each with the name that the user gave it."""
    chains: dict[tuple, list[Recording]] = {}
    notes: list[str] = []
    for named, path in paths:
        recordings, more = _read_folder(path) if path.is_dir() else (_read_named(path), [])
        notes += [note.replace(str(path), named.name) for note in more] if path is not named else more
        for recording in recordings:
            if path is not named:
                recording.source = f"{named.name}, {recording.source}" if recording.source != path.name else named.name
            chains.setdefault(_chain(recording), []).append(recording)
            if path is not named or str(path) == "-":  # where it lay is gone when the report is made
                recording.folder = None
    if not chains:
        raise ReportError(" ".join(notes) or "there is no log to read.")
    return runs_of(chains.values(), metric), notes


def _chain(recording: Recording) -> tuple:
    """Return what recordings share that can be one run: event files in one folder, slurm-41.out and slurm-42.out, local
    runs of W&B or SwanLab with one name.
    """
    folder = recording.folder
    if recording.format == "TensorBoard":
        return folder, recording.format
    if recording.format.endswith("local run"):
        return folder.parent, recording.format, recording.run
    return folder, recording.format, recording.run, re.sub(r"\d+", "", recording.source)


def _read_named(path: Path) -> list[Recording]:
    if str(path) != "-" and not path.is_fifo():
        return read_file(path)
    with ExitStack() as until:
        if str(path) == "-":
            return read_file(spool(stdin.buffer, "standard input", until), "standard input")
        return read_file(spool(until.enter_context(path.open("rb")), str(path), until), str(path))


def check(path: Path) -> None:
    """Raises ReportError where neither a file nor standard input is named."""
    if url := re.match(r"https?:/+([^/]+)/*(.*)", str(path)):
        raise ReportError(f"{path} is an address, and nothing is fetched from there. {_exported(url[1], url[2])}")
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if path.is_symlink() and not path.exists():
        raise ReportError(f"{path} is a link to {path.readlink()}, which does not exist.")
    if str(path) != "-" and not path.exists():
        guess = did_you_mean(
            path.name, [*COMMANDS, "report", "replay", "patch", *(entry.name for entry in path.parent.glob("*"))]
        )
        raise ReportError(f"{path} does not exist" + (guess or ": name a run's log, or the folder that holds it."))


def _exported(host: str, page: str) -> str:
    """Return the command by which a tracker exports the run at this address."""
    parts = [part for part in page.partition("?")[0].split("/") if part != "runs"]
    run = shlex.quote("/".join(parts[:3])) if len(parts) >= 3 else "ENTITY/PROJECT/RUN_ID"
    ways = {
        "wandb": "Export the run: python -c 'import sys, json, wandb; [print(json.dumps(row, default=str)) for row in "
        f"wandb.Api().run(sys.argv[1]).scan_history()]' {run} > run.jsonl",
        "mlflow": "Name the server's folder mlruns/, or its database, such as mlflow.db.",
        "swanlab": "Name the run's folder under swanlog/, or the CSV that a chart's menu exports.",
        "tensorboard": "Name the folder with the event files, or the CSV that a chart's download exports.",
    }
    known = next((way for name, way in ways.items() if name in host), None)
    return known or "Save the file first: curl -LO ADDRESS; of a tracker, export the run's metrics as a CSV."


def read_file(path: Path, name: str | None = None) -> list[Recording]:
    """Return the runs of one file, by the first format that fits and finds one; raises ReportError where there is
    none.
    """
    name, notes = name or path.name, []
    if not path.is_file():
        raise ReportError(f"{name} is neither a file, a folder nor a pipe: name a log of training steps.")
    if not path.stat().st_size:
        raise ReportError(f"{name} is empty: name a log with at least one training step.")
    first = Source(path, name)
    if first.head.lstrip()[:9].lower() == b"<!doctype" and b"<title>GradLoc" in first.head:
        raise ReportError(f"{name} is a page that gradloc wrote: name the log or the folder that it was made of.")
    for fits, read_as in FORMATS:
        if not fits(first):
            continue
        source = Source(path, name)  # a format that fits may have taken some of it
        recordings = [recording for recording in read_as(source) if recording.rows]
        for recording in recordings:
            recording.folder = path.parent
            if any(map(_BY_SAMPLES.search, [path.name, *recording.rows[0][1]])):
                recording.unit = "sample"
        if recordings:
            _drop_cut_value(source, recordings)
            return recordings
        notes += source.notes
    if kind := next((kind for begins, kind in _KINDS if re.match(begins, first.head[:4096], re.M | re.I)), ""):
        raise ReportError(" ".join([f"{name} has no metrics that can be read; it {kind}: name the run's log.", *notes]))
    unknown = "; it is no text, and no tracker's file that is known" if first.coding is None else ""
    refusal = (
        f"{name} has no metrics that can be read{unknown}. To read lines of another form, give "
        f"--pattern 'step (?P<step>\\d+).*norm (?P<value>\\S+)'. Known forms: {KNOWN}."
    )
    raise ReportError(" ".join([refusal, *notes]))


def _drop_cut_value(source: Source, recordings: list[Recording]) -> None:
    """Drop the number at the end of a file that ends within a line, which may lack digits: 90 of 903."""
    found = _LAST_NUMBER.search(source.last)
    if found is None or source.ends_whole:
        return
    for recording in recordings:
        *above, (step, values) = recording.rows[-21:]
        same = [name for name in reversed(values) if values[name] == number(found[0])]
        name = max(same, key=source.last.rfind, default=None)
        if name and may_lack_digits(found[0], [repr(row[name]) for _, row in above if name in row]):
            del values[name]
            recording.notes.append(
                f"The last line of {source.name} is cut off: {name} of {recording.unit} {step} may lack digits and was "
                "left out."
            )
            return


_KINDS = (
    (rb"\x80[\x02-\x05]", "is a Python pickle, which is not opened, as it may run code"),
    (rb"\x7fELF", "is a program"),
    (rb"%PDF", "is a PDF"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8", "is a picture, and a picture's values cannot be read"),
    (rb"\x89HDF", "is an HDF5 file"),
    (rb"\x93NUMPY", "is a NumPy array"),
    (rb"GGUF", "holds a model's weights (GGUF)"),
    (rb".{8}\{\s*\"", "holds a model's weights (safetensors)"),
    (rb"\s*<(?:!DOCTYPE html|html)", "is a web page, not the log that it shows"),
    (rb"#!.*\b(?:ba|z)?sh\b", "is a shell script, not what it printed"),
    (rb"(?s).*?^(?:import|from) \w+|.*?^def \w+\(", "is Python code, not what it printed"),
)
"""The first bytes of files that are no logs, and what they identify."""


def _read_folder(folder: Path) -> tuple[list[Recording], list[str]]:
    """Return the recordings of a folder, those with norms or else with losses; of those that hold the same ones, the
    one with the most metrics.
    """
    found: list[Recording] = []
    unread: list[str] = []

    def may_be_log(path: Path) -> bool:
        return bool(_ENDINGS.search(path.name) and not _SETTINGS.search(path.name) and path.stat().st_size)

    entries = [path for path in files_of(folder, DEPTH, stores.is_mlflow_run) if path.is_dir() or may_be_log(path)]
    for path in entries[:MOST]:
        try:
            recordings = [stores.read_mlflow_run(path)] if path.is_dir() else read_file(path)
        except (ReportError, OSError, ValueError):
            unread.append(path.relative_to(folder).as_posix())
            continue
        for recording in filter(lambda recording: recording.rows, recordings):
            is_event_file = recording.format == "TensorBoard" and path.parent != folder
            source = (path.parent if is_event_file else path).relative_to(folder).as_posix()
            recording.source = folder.name if source == "." else source
            found.append(recording)
    found = _joined(found)
    with_norms = [recording for recording in found if _norms(recording)]
    with_losses = [recording for recording in found if _losses(recording)]
    kept, notes = _distinct(with_norms or with_losses, _norms if with_norms else _losses)
    kept = kept or found[:1]
    judged = {each.source for each in with_norms or with_losses}
    unjudged = {each.source for each in found if LOGLIKE.search(each.source) and _losses(each)}
    if unjudged := sorted(unjudged - judged):
        count, verb = plural(len(unjudged), "log"), "was" if len(unjudged) == 1 else "were"
        notes.append(f"{count} of the folder without a gradient norm {verb} not judged: {first_of(unjudged)}.")
    silent = [name for name in unread if LOGLIKE.search(name)]
    if kept and silent:
        files = plural(len(silent), "file")
        notes.append(f"{files} of the folder held no metrics that can be read ({first_of(silent)}).")
    if len(entries) > MOST:
        notes.append(f"{folder} holds {len(entries)} files that could be logs; the first {MOST} were looked into.")
    if not kept:
        here = f" ({first_of(unread)} cannot be read as logs)" if unread else ""
        links = [path.name for path in folder.iterdir() if path.is_symlink() and not is_inside(path, folder)]
        here += f" ({first_of(sorted(links))} leads out of it, and is not followed)" if links else ""
        notes.append(f"{folder} holds no run's log{here}. What can be read: {KNOWN}.")
    return kept, notes


def files_of(
    folder: Path, depth: int, is_one: Callable[[Path], bool] = lambda folder: False, top: Path | None = None
) -> Iterator[Path]:
    """Yield the files of a folder and of those below it, by name; a folder that ``is_one`` counts as one file.

    A link to a folder is not followed, nor one out of ``top``, which is the folder where None.
    """
    top = top or folder
    if is_one(folder):
        yield folder
        return
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: _natural(entry.name))
    except OSError:  # somebody else's folder, or one that just went away
        return
    yield from (file for file in entries if file.is_file() and (not file.is_symlink() or is_inside(file, top)))
    for entry in entries:
        if depth and entry.is_dir() and not entry.is_symlink() and not _SKIPPED.fullmatch(entry.name):
            yield from files_of(entry, depth - 1, is_one, top)


def _natural(name: str) -> list:
    """Sorts slurm-9.out before slurm-10.out."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _distinct(
    recordings: list[Recording], values_of: Callable[[Recording], list[float]]
) -> tuple[list[Recording], list[str]]:
    """Return each run once: a console log and a tracker's files hold the same values, norms or losses."""
    norms = [values_of(recording) for recording in recordings]
    num_metrics = [sum(not name.startswith("_") for name in recording.rows[-1][1]) for recording in recordings]
    order = sorted(range(len(recordings)), key=lambda at: (-len(norms[at]), -num_metrics[at]))
    kept: list[int] = []
    same: list[str] = []
    for at in order:
        if any(_is_within(norms[at], norms[other]) for other in kept):
            same.append(recordings[at].source)
        else:
            kept.append(at)
    names = first_of(list(dict.fromkeys(same)))
    notes = [f"{plural(len(same), 'other file')} of the folder held the same steps ({names})."] if same else []
    return [recordings[at] for at in sorted(kept)], notes


def _joined(recordings: list[Recording]) -> list[Recording]:
    """Return recordings, those of one metric each put together where they are of one folder and of the same steps, as
    DeepSpeed's monitor and TensorBoard write a CSV for each metric.
    """
    kept: list[Recording] = []
    first: dict[tuple, Recording] = {}
    for recording in recordings:
        steps, names = [step for step, _ in recording.rows], {*chain(*(values for _, values in recording.rows))}
        key = recording.folder, recording.format, *steps
        if len(names) > 1 or recording.unit == "row" or names & first.setdefault(key, recording).rows[0][1].keys():
            kept.append(recording)  # the first of them, too
            continue
        for (_, values), (_, own) in zip(first[key].rows, recording.rows, strict=True):
            values.update(own)
        first[key].source = recording.folder.name
    return kept


def _norms(recording: Recording, is_one: Callable[[str], bool] = is_norm) -> list[float]:
    """Return the first norm of each row; inf for one that is not finite."""
    found: list[float] = []
    for _, values in recording.rows:
        found += [value for name, value in values.items() if is_one(name)][:1]
    return [value if math.isfinite(value) else math.inf for value in found]


_losses = partial(_norms, is_one=is_training_loss)


def _is_within(few: list[float], many: list[float]) -> bool:
    """Return whether one list of norms is a stretch of the other; loggers round differently."""
    is_near = partial(math.isclose, rel_tol=5e-3, abs_tol=5e-4)
    ends = range(len(few), len(many) + 1)
    sample = range(0, len(few), len(few) // 64 + 1)  # of equal norms each stretch would be compared to its end
    likely = (end for end in ends if all(is_near(few[at], many[end - len(few) + at]) for at in sample))
    return any(all(map(is_near, few, many[end - len(few) : end])) for end in islice(likely, 8))
