# SPDX-License-Identifier: Apache-2.0
"""What a file is, its content says: one table of formats, the first that fits reads it."""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfileobj
from sys import stdin

from ...words.text import first_of, plural
from ..errors import ReportError
from .databases import is_database, is_mlflow_run, read_database, read_mlflow_run
from .documents import is_document, read_document
from .lines import read_lines
from .names import is_norm
from .recording import Recording
from .segments import LoggedRun, runs_of
from .source import Source
from .stores import is_swanlab, is_tensorboard, is_wandb, read_swanlab, read_tensorboard, read_wandb
from .tables import is_table, read_table

FORMATS: tuple[tuple[Callable[[Source], bool], Callable[[Source], list[Recording]]], ...] = (
    (is_wandb, read_wandb),
    (is_swanlab, read_swanlab),
    (is_database, read_database),
    (is_tensorboard, read_tensorboard),
    (is_document, read_document),
    (is_table, read_table),
    (lambda source: not source.is_binary, read_lines),
)
"""What fits, by a file's first bytes and else its name, and what reads it: to nothing where it is something else."""
KNOWN = (
    "a console log (verl, TRL, OpenRLHF, slime, NeMo-RL, AReaL, prime-rl, Megatron), verl's file logger, TensorBoard, "
    "W&B, MLflow, SwanLab, trackio, trainer_state.json, or a CSV"
)
DEPTH = 6
"""How many folders down logs are looked for."""
MOST = 400
"""Files of a folder that are looked into."""
_SKIPPED = re.compile(
    r"checkpoints?|events|__pycache__|node_modules|\.git|\.venv|site-packages|global_step_\d+|gradient_analysis"
)
_ENDINGS = re.compile(
    r"\.(?:log|txt|out|err|jsonl?|ndjson|ipynb|csv|tsv|db|sqlite3?|wandb|swanlab)(?:\.\d+)?(?:\.(?:gz|xz|bz2|zst))?$|\.tfevents\.|^[^.]+$",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"^events\.jsonl$|^requirements.*\.txt$|(?:config|args|tokenizer|vocab|tokens|metadata|index|summary)[^/]*\.json$"
)
"""What lies beside logs and is none."""
_LOGLIKE = re.compile(r"\.(?:log|out|jsonl|csv|tsv|wandb|swanlab)(?:\.\w+)?$|\.tfevents\.")


@dataclass
class Log:
    """The runs of whatever was named."""

    runs: list[LoggedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs)


def read(paths: Sequence[Path], metric: str | None = None) -> Log:
    """The runs in files, folders, or standard input (``-``).

    Args:
        paths: at least one.
        metric: the one that holds the gradient norms; None: the one that looks like it.

    Raises:
        ReportError: when there is no run; one sentence, with what to do.
    """
    chains: dict[tuple, list[Recording]] = {}
    notes: list[str] = []
    for path in paths:
        found, more = _of_folder(path) if path.is_dir() else (_of_file(path), [])
        notes += more
        for where, recording in found:
            chains.setdefault(_chain(where, recording), []).append(recording)
    if not chains:
        raise ReportError(" ".join(notes) or "there is no log to read.")
    return Log(runs_of(chains.values(), metric), notes)


def _chain(where: Path, recording: Recording) -> tuple:
    """What recordings share that can be one run: event files in one folder, slurm-41.out and slurm-42.out, local runs
    of W&B or SwanLab with one name."""
    if recording.format == "TensorBoard":
        return where, recording.format
    if recording.format.endswith("local run"):
        return where.parent, recording.format, recording.run
    return where, recording.format, recording.run, re.sub(r"\d+", "", recording.source)


def _of_file(path: Path) -> list[tuple[Path, Recording]]:
    with tempfile.NamedTemporaryFile() as copy:
        is_piped = str(path) == "-"
        if is_piped:
            copyfileobj(stdin.buffer, copy)
            copy.flush()
        elif not path.exists():
            raise ReportError(missing(path))
        found = read_file(Path(copy.name) if is_piped else path, "standard input" if is_piped else path.name)
    return [(path.parent, recording) for recording in found]


def missing(path: Path) -> str:
    """What to say of a path that is not there."""
    if re.match(r"https?:/", str(path)):
        return (
            f"{path} is an address, and this command reads files: download the run's log, or export the panel as CSV."
        )
    return f"{path} does not exist: name a run's log, or the folder that holds it."


def read_file(path: Path, name: str | None = None) -> list[Recording]:
    """The runs of one file, by the first format that fits and finds one.

    Raises:
        ReportError: where there is none; one sentence, with what to do.
    """
    tried: list[str] = []
    if not path.stat().st_size:
        raise ReportError(f"{name or path} is empty: name a log with at least one training step.")
    for fits, read_as in FORMATS:
        source = Source(path, name)
        if not fits(source):
            continue
        found = [recording for recording in read_as(source) if recording.rows]
        if found:
            return found
        tried += source.notes
    refusal = f"{name or path} has no metrics that can be read: name a log of training steps: {KNOWN}."
    raise ReportError(" ".join([refusal, *tried]))


def _of_folder(folder: Path) -> tuple[list[tuple[Path, Recording]], list[str]]:
    """The recordings of a folder; of those that hold the same norms, the one with the most metrics."""
    found: list[tuple[Path, Recording]] = []
    unread: list[str] = []
    entries = [folder] if is_mlflow_run(folder) else list(_entries(folder, DEPTH))
    for path in entries[:MOST]:
        try:
            recordings = [read_mlflow_run(path)] if path.is_dir() else read_file(path)
        except (ReportError, OSError):
            unread.append(path.relative_to(folder).as_posix())
            continue
        for recording in recordings:
            is_event_file = recording.format == "TensorBoard" and path.parent != folder
            source = (path.parent if is_event_file else path).relative_to(folder).as_posix()
            recording.source = folder.name if source == "." else source
            if recording.rows:
                found.append((path if path.is_dir() else path.parent, recording))
    with_norms = [entry for entry in found if _norms(entry[1])]
    kept, notes = _distinct(with_norms) if with_norms else (found[:1], [])
    silent = [name for name in unread if _LOGLIKE.search(name)]
    if kept and silent:
        files = plural(len(silent), "file")
        notes.append(f"{files} of the folder held no metrics that can be read ({first_of(silent)}).")
    if len(entries) > MOST:
        notes.append(f"{folder} holds {len(entries)} files that could be logs; the first {MOST} were looked into.")
    if not kept:
        here = f" ({first_of(unread)} cannot be read as logs)" if unread else ""
        notes.append(f"{folder} holds no run's log{here}: name a folder or file with one: {KNOWN}.")
    return kept, notes


def _entries(folder: Path, depth: int) -> Iterator[Path]:
    """What may be a log in a folder, nearest first, by name."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: _natural(entry.name))
    except OSError:  # somebody else's folder, or one that just went away
        return
    for entry in entries:
        if (
            entry.is_file()
            and _ENDINGS.search(entry.name)
            and not _SETTINGS.search(entry.name)
            and entry.stat().st_size
        ):
            yield entry
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and depth:
            if is_mlflow_run(entry):
                yield entry
            elif not _SKIPPED.fullmatch(entry.name):
                yield from _entries(entry, depth - 1)


def _natural(name: str) -> list:
    """Sorts slurm-9.out before slurm-10.out."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _distinct(found: list[tuple[Path, Recording]]) -> tuple[list[tuple[Path, Recording]], list[str]]:
    """Each run once: a console log and a tracker's files hold the same norms."""
    norms = {id(recording): _norms(recording) for _, recording in found}
    order = sorted(found, key=lambda entry: (-len(norms[id(entry[1])]), -_num_metrics(entry[1])))
    kept: list[tuple[Path, Recording]] = []
    same: list[str] = []
    for entry in order:
        if any(_within(norms[id(entry[1])], norms[id(other)]) for _, other in kept):
            same.append(entry[1].source)
        else:
            kept.append(entry)
    kept.sort(key=lambda entry: found.index(entry))
    names = first_of(list(dict.fromkeys(same)))
    notes = [f"{plural(len(same), 'other file')} of the folder held the same steps ({names})."] if same else []
    return kept, notes


def _num_metrics(recording: Recording) -> int:
    return sum(not name.startswith("_") for name in recording.rows[-1][1])


def _norms(recording: Recording) -> list[float]:
    """The gradient norms of a recording in the order written."""
    return [
        next(value for name, value in values.items() if is_norm(name))
        for _, values in recording.rows
        if any(map(is_norm, values))
    ]


def _within(few: list[float], many: list[float]) -> bool:
    """Whether one list of norms is a stretch of the other; loggers round differently."""
    if not few or len(few) > len(many):
        return False
    return any(
        _near(few[0], many[at]) and all(_near(a, b) for a, b in zip(few, many[at : at + len(few)], strict=True))
        for at in range(len(many) - len(few) + 1)
    )


def _near(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return not math.isfinite(a) and not math.isfinite(b)
    return math.isclose(a, b, rel_tol=5e-3, abs_tol=5e-4)
