# SPDX-License-Identifier: Apache-2.0
"""Find changes of the code that the tests do not notice (mutation testing).

    make mutants                                            # the sample; resumes
    .gradloc/venv/bin/python scripts/mutants --again        # only the survivors

Maintained tools do not fit: cosmic-ray starts Python and torch for each mutant, mutmut rewrites every function, which
breaks tests that read sources or start ranks, and neither samples by a seed. Here a process with torch is forked for
each mutant. The fork runs the tests that reach the changed lines, the room's own and quick ones first, until one fails.
The lines of each test are traced once, and again after changes.
"""

import argparse
import contextlib
import hashlib
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from changes import Mutant, mutants_of
from forks import OUTPUT, Chosen, Traced, copied, in_copies, run_tests

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".gradloc" / "mutants"
RECORD = ROOT / "lab" / "benchmarks" / "results" / "mutants.json"
SEED, SAMPLE, WORKERS = 20, 900, 2

SOURCES = [
    f"gradloc/{room}" for room in ("core", "search", "loop", "record", "explain", "stabilize", "health", "watch")
]
SOURCES += ["gradloc/reweighting", "patchkit"]
TESTS = ["core", "toy_model", "search", "loop", "record", "explain", "stabilize", "health", "reweighting", "patchkit"]
TESTS += [
    "report/pages/test_document.py",
    "watch",
    "repo_checks/test_examples.py",
    "repo_checks/test_settings.py",
]
WARM = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "hypothesis", "jinja2", "jsonschema", "numpy"]
MOST_SECONDS = 20.0
"""Seconds of tests for one mutant, by their usual time."""

Tests = dict[str, tuple[float, dict[str, list[int]]]]
"""Each test's seconds, and file -> lines that it reaches."""


def files_in(folders: list[str], pattern: str) -> list[str]:
    found = {
        path for name in folders for path in ((ROOT / name).rglob(pattern) if (ROOT / name).is_dir() else [ROOT / name])
    }
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


# ---- which test reaches which line


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def is_fresh(digests: dict[str, str]) -> bool:
    return all(digest(ROOT / name) == was for name, was in digests.items())


def traced(folders: list[Path]) -> Tests:
    """Return every test; trace changed test files, and those whose sources changed, again."""
    kept = STATE / "lines.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    names = files_in([f"tests/{name}" for name in TESTS], "test_*.py")
    known = {name: known[name] for name in names if name in known and is_fresh(known[name]["of"])}
    stale = sorted(set(names) - known.keys(), key=lambda name: -(ROOT / name).stat().st_mtime)  # last edited first
    lengths = {name: len((ROOT / name).read_bytes().splitlines()) for name in files_in(SOURCES, "*.py")}

    for name, entry in in_copies(folders, trace, [(name, lengths) for name in stale]):
        known[name] = entry
        kept.write_text(json.dumps(known))
    return {test: found for entry in known.values() for test, found in entry["tests"].items()}


def trace(folder: Path, name: str, lengths: dict[str, int]) -> tuple[str, dict[str, Any]]:
    """Trace a test file; return its name, and its tests with the digests of the sources that they reach."""
    ended = run_tests(folder, ["--maxfail=1000", name], Traced(folder, lengths), 900)
    tests = ended.get("result", {})
    print(f"{name}: {len(tests)} tests, {sum(seconds for seconds, _ in tests.values()):.1f} s", flush=True)
    if ended.get("code") not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print((folder / OUTPUT).read_text()[-3000:], "its tests that fail as it is judge nothing", flush=True)
    reached = {source for _, lines in tests.values() for source in lines}
    return name, {"of": {path: digest(folder / path) for path in [name, *reached]}, "tests": tests}


def chosen(mutant: Mutant, tests: Tests) -> list[dict[str, float]]:
    """Return the tests that reach a mutant and their seconds, quick ones first: those of its room, then others."""
    lines = {*range(mutant.line, mutant.last + 1)}
    room = mutant.file.removeprefix("gradloc/").split("/")[0]
    own = f"tests/{room}/test_{Path(mutant.file).stem}.py"  # its file was imported before the tracing

    def reaches(name: str, found: dict[str, list[int]]) -> bool:
        if mutant.is_import:
            return mutant.file in found or name.startswith(own)
        return not lines.isdisjoint(found.get(mutant.file, []))

    reach = {name: seconds for name, (seconds, found) in tests.items() if reaches(name, found)}
    own, others, total = dict[str, float](), dict[str, float](), 0.0
    for name in sorted(reach, key=lambda name: (name.split("/")[1] != room, reach[name])):
        total += reach[name]
        if total <= MOST_SECONDS or total == reach[name]:
            (own if name.split("/")[1] == room else others)[name] = reach[name]
    return [names for names in (own, others) if names]


# ---- the run


def population() -> list[Mutant]:
    return [mutant for name in files_in(SOURCES, "*.py") for mutant in mutants_of(name, (ROOT / name).read_bytes())]


def tried(folder: Path, mutant: Mutant, source: bytes, groups: list[dict[str, float]]) -> tuple[str, dict[str, Any]]:
    """Return the mutant's name, and what killed it: a test, or "time"; None if it survives."""
    found: dict[str, Any] = {"killed_by": None, "note": "" if groups else "no test reaches it"}
    place = folder / mutant.file
    place.write_bytes(mutant.applied(source))
    os.utime(place, (0, int(mutant.rank(SEED)[:7], 16)))  # Python identifies compiled code by size and time
    try:
        for tests in groups:
            files = sorted({name.split("::")[0] for name in tests})
            ended = run_tests(folder, files, Chosen([*tests]), 15 + 4 * sum(tests.values()))
            if ended.get("code") != 0:
                found["killed_by"] = ended.get("result") or ("the import" if ended else "time")
                break
    finally:
        place.write_bytes(source)
        os.utime(place, (0, 0))
    said = f"killed by {found['killed_by']}" if found["killed_by"] else f"LIVED {found['note']}"
    print(f"{mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}: {said}", flush=True)
    return mutant.name, found


def write_record(places: int, sample: list[Mutant], known: dict[str, Any]) -> None:
    """Write the record; handwritten notes on equivalent survivors are kept."""
    before = json.loads(RECORD.read_text())["survivors"] if RECORD.exists() else []
    whys = {entry["name"]: entry["equivalent"] for entry in before}
    tried = sorted((mutant for mutant in sample if mutant.name in known), key=lambda m: (m.file, m.line))
    survivors = [
        {"at": f"{m.file}:{m.line}", "before": m.before, "after": m.after, "note": known[m.name]["note"]}
        | {"equivalent": whys.get(m.name, ""), "name": m.name}
        for m in tried
        if not known[m.name]["killed_by"]
    ]
    num_equivalent = sum(bool(entry["equivalent"]) for entry in survivors)
    counted, killed = len(tried) - num_equivalent, len(tried) - len(survivors)
    record = {"seed": SEED, "places": places, "counted": counted, "killed": killed, "survivors": survivors}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"{killed} of {counted} killed, {killed / max(counted, 1):.1%}; {num_equivalent} change nothing: {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=SAMPLE, help="number of mutants of the sample, in random order")
    parser.add_argument("--again", action="store_true", help="try those that lived again")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in WARM:
        with contextlib.suppress(ImportError):
            __import__(name)
    STATE.mkdir(parents=True, exist_ok=True)
    folders = [copied(ROOT, STATE / f"copy{number}") for number in range(WORKERS)]
    tests = traced(folders)
    kept = STATE / "results.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    places = population()
    ranked = sorted(places, key=lambda mutant: mutant.rank(SEED))
    sample = list(islice((m for m in ranked if m.is_code((ROOT / m.file).read_bytes())), options.first))
    if options.again:
        known = {name: found for name, found in known.items() if found["killed_by"]}
    with contextlib.suppress(KeyboardInterrupt):  # the tried mutants are kept
        rest = [mutant for mutant in sample if mutant.name not in known]
        # all at once, since the working tree may be edited meanwhile
        sources = {mutant.file: (ROOT / mutant.file).read_bytes() for mutant in rest}
        for name, found in in_copies(folders, tried, [(m, sources[m.file], chosen(m, tests)) for m in rest]):
            known[name] = found
            kept.write_text(json.dumps(known))
    write_record(len(places), sample, known)


if __name__ == "__main__":
    main()
